"""Checkpoints in one process: exact, in place, durable, and refused with a reason when they do not fit."""

from __future__ import annotations

import errno
import os
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from apportion.errors import OptionError, TargetError
from apportion.records import from_json_text, to_json_text
from apportion.running import checkpoint, checkpoint_files
from apportion.running.checkpoint import (
    CheckpointMeta,
    Kind,
    hash_parameters,
    latest_checkpoint,
    load_checkpoint,
    read_kinds,
    save_checkpoint,
)

META = CheckpointMeta(
    epoch=2,
    world_size=1,
    strategy="ddp",
    loader={"epoch": 2, "position": 12, "num_samples": None, "shuffle": True},
    schedule={"last_epoch": 3, "base_lrs": [0.1, 1e-300], "nested": {"a": None}},
    versions={"torch": torch.__version__},
)


def make_state(seed: int) -> dict[str, Any]:
    """Odd shapes, every kind of number, nested mappings with integer keys, lists with and without tensors."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weight = numbers(2, 2, 3).requires_grad_()
    return {
        "model": {"w": weight, "half": numbers(5).bfloat16(), "flag": numbers(6) > 0, "none": torch.zeros(0)},
        "optimizer": {
            "state": {0: {"step": torch.tensor(float(seed)), "m": numbers(3, 7).t()}, 1: {}},
            "param_groups": [{"lr": 0.1 * seed, "params": [0, 1]}],
            "groups_with_tensors": [{"lr": numbers(1), "name": f"g{seed}"}],
        },
        "count": torch.tensor(seed, dtype=torch.int64),
        "rng": torch.Generator().manual_seed(seed).get_state(),
        "seed": seed,
    }


def flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{name}/{key!r}").items()}
    if isinstance(value, list):
        return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{name}[{i}]").items()}
    return {name: value}


def same(one: Any, other: Any) -> bool:
    left, right = flat(one), flat(other)
    return left.keys() == right.keys() and all(
        torch.equal(a, right[k]) and a.dtype == right[k].dtype if isinstance(a, torch.Tensor) else a == right[k]
        for k, a in left.items()
    )


def save(root: Path, step: int, *, seed: int | None = None, keep: int = 2) -> Path:
    return save_checkpoint(
        root, step=step, state=make_state(step if seed is None else seed), meta=META, keep=keep
    )


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_round_trip_is_exact_and_in_place(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    state = make_state(0)
    assert not same(state, make_state(7))
    before = {key: value for key, value in flat(state).items() if isinstance(value, torch.Tensor)}
    meta = load_checkpoint(path, state)
    assert same(state, make_state(7))
    assert all(flat(state)[key] is tensor for key, tensor in before.items())
    assert (meta.step, meta.epoch, meta.loader, meta.schedule) == (7, 2, META.loader, META.schedule)
    assert names(tmp_path) == ["latest", "step-7"]
    assert {item.name for item in meta.files} == {".metadata", "__0_0.distcp"}


def test_meta_travels_as_json() -> None:
    assert from_json_text(CheckpointMeta, to_json_text(META)) == META


def test_hash_of_parameters_sees_name_shape_and_type() -> None:
    named = [("a", torch.zeros(2, 3)), ("b", torch.zeros(1))]
    base = hash_parameters(named)
    assert hash_parameters(reversed(named)) == base
    for other in (("c", named[0][1]), ("a", torch.zeros(3, 2)), ("a", torch.zeros(2, 3, dtype=torch.float64))):
        assert hash_parameters([other, named[1]]) != base


def test_keeps_the_newest_and_leaves_later_ones_alone(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        save(tmp_path, step)
    assert names(tmp_path) == ["latest", "step-10", "step-15"]
    save(tmp_path, 12)
    assert names(tmp_path) == ["latest", "step-10", "step-12", "step-15"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-12"
    save(tmp_path, 20, keep=1)
    assert names(tmp_path) == ["latest", "step-20"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 5, seed=1)
    path = save(tmp_path, 5, seed=2)
    state = make_state(0)
    load_checkpoint(path, state)
    assert same(state, make_state(2))
    assert names(tmp_path) == ["latest", "step-5"]


def test_latest_ignores_what_is_unfinished(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nowhere") is None
    assert latest_checkpoint(tmp_path) is None
    (tmp_path / "step-9.tmp-abc").mkdir()
    (tmp_path / "step-8").mkdir()
    assert latest_checkpoint(tmp_path) is None
    save(tmp_path, 3)
    assert names(tmp_path) == ["latest", "step-3", "step-8"]
    (tmp_path / "latest").write_text("step-8\n")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-3"
    (tmp_path / "latest").unlink()
    save_again = tmp_path / "step-3"
    save_again.rename(tmp_path / "step-3.old")
    assert latest_checkpoint(tmp_path) == tmp_path / "step-3.old"


def damage_cut(path: Path) -> Path:
    file = path / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 100)
    return file


def damage_bit(path: Path) -> Path:
    file = path / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    return file


def damage_gone(path: Path) -> Path:
    file = path / ".metadata"
    file.unlink()
    return file


def damage_meta(path: Path) -> Path:
    file = path / "meta.json"
    file.write_text(file.read_text()[:50])
    return file


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (damage_cut, "bytes where"),
        (damage_bit, "checksum"),
        (damage_gone, "missing"),
        (damage_meta, "not a JSON document"),
    ],
)
def test_damaged_files_are_named_with_the_older_checkpoint(tmp_path: Path, damage: Any, found: str) -> None:
    older, path = save(tmp_path, 1), save(tmp_path, 2)
    file = damage(path)
    state = make_state(0)
    with pytest.raises(TargetError) as caught:
        load_checkpoint(path, state)
    assert f"{file} is damaged" in caught.value.what
    assert found in caught.value.found
    assert caught.value.try_ == f"resume from {older}"
    assert same(state, make_state(0))
    load_checkpoint(older, state)
    assert same(state, make_state(1))


def test_no_checkpoint_there(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no such directory"):
        load_checkpoint(tmp_path / "step-1", {})
    with pytest.raises(TargetError, match="unfinished"):
        load_checkpoint(tmp_path, {})


def test_a_checkpoint_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    state = make_state(0)
    state["model"]["more"] = torch.zeros(1)
    del state["seed"]
    state["model"]["half"] = torch.zeros(4, dtype=torch.bfloat16)
    state["count"] = torch.tensor(0, dtype=torch.int32)
    state["model"]["flag"] = "an object"
    with pytest.raises(TargetError, match="checkpoint of another model") as caught:
        load_checkpoint(path, state)
    for text in (
        "not in the checkpoint: model.more",
        "in the checkpoint only: seed",
        "model.half (bfloat16[5] saved, bfloat16[4] here)",
        "count (int64[] saved, int32[] here)",
        "model.flag (bool[6] saved, object here)",
    ):
        assert text in caught.value.found
    assert state["count"] == 0


def test_kinds_tell_what_a_checkpoint_holds(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    kinds = read_kinds(path)
    assert kinds["optimizer.state.0.m"] == Kind((7, 3), torch.float32, 84)
    assert kinds["model.half"] == Kind((5,), torch.bfloat16, 10)
    assert kinds["optimizer.param_groups"] == Kind()
    os.truncate(path / ".metadata", 30)
    with pytest.raises(TargetError, match=r"\.metadata is damaged[^~]*30 bytes where"):
        read_kinds(path)


def test_two_entries_with_one_key_are_our_bug() -> None:
    with pytest.raises(ValueError, match=r"two entries .* a\.b"):
        save_checkpoint(Path("unused"), step=1, state={"a.b": 1, "a": {"b": 2}}, meta=META)


@contextmanager
def file_size_limit(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def check_only_the_old_one_is_left(root: Path) -> None:
    assert names(root) == ["latest", "step-1"]
    state = make_state(0)
    latest = latest_checkpoint(root)
    assert latest is not None
    load_checkpoint(latest, state)
    assert same(state, make_state(1))


def test_a_disk_that_fills_up_while_writing(tmp_path: Path) -> None:
    save(tmp_path, 1)
    big = {"model": {"w": torch.zeros(100_000)}}
    with file_size_limit(50_000), pytest.raises(OptionError) as caught:
        save_checkpoint(tmp_path, step=2, state=big, meta=META)
    assert "390.6 KiB cannot be written" in caught.value.what
    assert "400000 bytes" in caught.value.found
    assert "bytes free" in caught.value.found
    check_only_the_old_one_is_left(tmp_path)


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_a_disk_too_full_to_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: Usage(10, 0, 10))
        with pytest.raises(OptionError, match=r"10 B free; it needs at least \d+ bytes"):
            save(tmp_path, 2)
    check_only_the_old_one_is_left(tmp_path)


def test_a_failure_before_the_move_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)

    def refuse(path: Path, text: str) -> None:
        raise OSError(errno.EIO, "planted")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "write_durably", refuse)
        with pytest.raises(OptionError, match=r"cannot be written[^~]*planted"):
            save(tmp_path, 2)
    check_only_the_old_one_is_left(tmp_path)


def test_latest_moves_after_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash between the two moves leaves `latest` on the older one, which is still there."""
    save(tmp_path, 1, keep=1)

    def crash(path: Path, text: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_files, "write_durably", crash)
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["latest", "step-1", "step-2"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-1"


def test_an_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot be written"):
        save(tmp_path / "file" / "checkpoints", 1)
