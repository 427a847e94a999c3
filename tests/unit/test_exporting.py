"""Exported files read back bit for bit, with Hugging Face's names, and tied weights once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn

from apportion.errors import OptionError
from apportion.running.exporting import export_safetensors


class Tied(nn.Module):
    """Input and output embedding are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.wte.weight


class Views(Tied):
    """And tensors of every kind, some of which share memory without being the same."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.randn(5).bfloat16())
        self.register_buffer("seen", torch.tensor(3))
        base = torch.randn(4, 6)
        self.register_buffer("base", base)
        self.register_buffer("turned", base.t())
        self.register_buffer("row", base[1])
        self.register_buffer("flat", base.view(24))
        self.register_buffer("mask", torch.rand(6) > 0.5)


def check_equal(loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert torch.equal(loaded[name], tensor), name


def test_one_file_reads_back(tmp_path: Path) -> None:
    model = Views()
    (file,) = export_safetensors(tmp_path / "out", model.state_dict(keep_vars=True))
    assert file == tmp_path / "out" / "model.safetensors"
    expected = dict(model.state_dict())
    del expected["head.weight"]
    check_equal(load_file(file), expected)
    assert not torch.equal(Views().small, model.small)


def test_safetensors_loads_tied_weights_into_a_model(tmp_path: Path) -> None:
    model, other = Tied(), Tied()
    (file,) = export_safetensors(tmp_path, model.state_dict())
    with safe_open(file, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "head.weight": "wte.weight"}
    assert not torch.equal(other.wte.weight, model.wte.weight)
    load_model(other, file)
    check_equal(dict(other.state_dict()), dict(model.state_dict()))


def test_many_files_with_an_index(tmp_path: Path) -> None:
    model = Views()
    (tmp_path / "net.safetensors").write_text("an earlier export")
    written = export_safetensors(tmp_path / "net.safetensors", model.state_dict(), max_shard_bytes=110)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert sorted(path.name for path in written) == names
    index = json.loads((tmp_path / "net.safetensors.index.json").read_text())
    shards = {name: load_file(tmp_path / name) for name in names if name.endswith(".safetensors")}
    assert len(shards) > 3
    assert all(f"-of-{len(shards):05}." in name for name in shards)
    expected = dict(model.state_dict())
    del expected["head.weight"]
    check_equal({name: shards[file][name] for name, file in index["weight_map"].items()}, expected)
    sizes = [sum(t.numel() * t.element_size() for t in shard.values()) for shard in shards.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert all(size <= 110 for size in sizes)
    export_safetensors(tmp_path / "net.safetensors", model.state_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["net.safetensors"]


def test_a_tensor_larger_than_a_file_may_be_has_its_own(tmp_path: Path) -> None:
    written = export_safetensors(
        tmp_path, {"a": torch.zeros(1), "b": torch.zeros(9), "c": torch.zeros(1)}, max_shard_bytes=8
    )
    assert [len(load_file(path)) for path in written[:-1]] == [1, 1, 1]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="4 B cannot be written"):
        export_safetensors(tmp_path / "file" / "out", {"a": torch.zeros(1)})
