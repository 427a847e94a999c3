"""What four ranks save, three, two and one load bit for bit: sharded, replicated and partitioned by key."""

from __future__ import annotations

import re
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from apportion.errors import ApportionError
from apportion.running.checkpoint import CheckpointMeta, latest_checkpoint, load_checkpoint, save_checkpoint
from apportion.running.exporting import export_safetensors
from apportion.running.together import on_every_rank
from ranks import RankPool

pytestmark = pytest.mark.slow

SHAPES = ((6,), (5,), (1,), (3, 7), (2, 2, 3))
Flat = dict[str, Any]


class Odd(nn.Module):
    """Parameters whose sizes do not divide by the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.ParameterList(torch.randn(shape) for shape in SHAPES)

    def forward(self) -> torch.Tensor:
        return torch.stack([(parameter**2).sum() for parameter in self.odd]).sum()


def build(rank: int, seed: int) -> dict[str, Any]:
    """A model and its Adam after one step under fully_shard, and tensors of every kind and placement."""
    torch.manual_seed(seed)
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    model = Odd()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model().backward()
    optimizer.step()
    plain = {
        "bf16": torch.randn(3, 7).bfloat16(),
        "int64": torch.randint(1 << 60, (5,)),
        "bool": torch.rand(6) > 0.5,
        "scalar": torch.randn(()),
        "float64": torch.randn(1, dtype=torch.float64),
    }
    sharded = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in plain.items() if value.dim()}
    by_columns = distribute_tensor(torch.randn(3, 7), mesh, [Shard(1)])
    copies = distribute_tensor(torch.randn(2, 2, 3), mesh, [Replicate()])
    parts = {f"p{index}": torch.randn(shape) for index, shape in enumerate((*SHAPES, ()))}
    owned = {name: value for index, (name, value) in enumerate(parts.items()) if index % world == rank}
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "plain": {name: value.clone() for name, value in plain.items()},
        "sharded": sharded,
        "columns": by_columns,
        "copies": copies,
        "partitioned": {"state": owned},
        "note": f"seed {seed}",
    }


def collect(state: dict[str, Any], prefix: str = "") -> Flat:
    """Every tensor in full, from whichever rank holds it."""
    out: Flat = {}
    for key, value in state.items():
        if isinstance(value, dict):
            out |= collect(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value.full_tensor() if isinstance(value, DTensor) else value
    return {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in out.items()}


def save_all(rank: int, root: str) -> Flat:
    state = build(rank, seed=1)
    path = save_checkpoint(Path(root), step=4, state=state, meta=CheckpointMeta(world_size=4))
    assert path == Path(root) / "step-4"
    export_safetensors(Path(f"{root}-export"), state["model"] | state["sharded"], max_shard_bytes=100)
    return collect(state)


def load_all(rank: int, root: str) -> tuple[Flat, Flat]:
    state = build(rank, seed=2)
    before = {key: value.clone() for key, value in collect(state).items() if isinstance(value, torch.Tensor)}
    local = state["model"]["odd.0"].to_local().data_ptr()
    path = latest_checkpoint(Path(root))
    assert path is not None
    assert load_checkpoint(path, state).step == 4
    assert state["model"]["odd.0"].to_local().data_ptr() == local
    return before, collect(state)


def planted(rank: int) -> None:
    class OwnError(RuntimeError):
        """Does not pickle."""

    if rank == 1:
        raise OwnError("planted")


def refused(rank: int, root: str, how: str) -> str:
    """The error that every rank sees when only rank 1 meets the trouble."""
    state: dict[str, Any] = {"w": torch.full((1000,), 1.0), f"own{rank}": torch.zeros(40_000)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        if how == "disk":
            if rank == 1:
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
            save_checkpoint(Path(root), step=5, state=state, meta=CheckpointMeta())
        elif how == "own class":
            on_every_rank(partial(planted, rank))
        elif how == "shape":
            state["w"] = torch.zeros(10 + rank)
            save_checkpoint(Path(root), step=5, state=state, meta=CheckpointMeta())
        else:
            state = build(rank, seed=2)
            if rank == 1:
                state["extra"] = torch.zeros(1)
            load_checkpoint(Path(root) / "step-4", state)
    except (ApportionError, ValueError, RuntimeError) as error:
        return re.sub(r"\d+ bytes free", "", f"{type(error).__name__}: {error}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return "no error"


def merge(parts: list[Flat]) -> Flat:
    whole: Flat = {}
    for part in parts:
        for key, value in part.items():
            if key in whole and isinstance(value, torch.Tensor):
                assert torch.equal(whole[key], value), key
            whole[key] = value
    return whole


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Flat]:
    root = tmp_path_factory.mktemp("checkpoints")
    with RankPool(4) as pool:
        whole = merge(pool.run(save_all, str(root)))
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step-4"]
    return root, whole


@pytest.mark.parametrize("world_size", [3, 2, 1])
def test_four_ranks_save_and_others_load(saved: tuple[Path, Flat], world_size: int) -> None:
    root, expected = saved
    with RankPool(world_size) as pool:
        results = pool.run(load_all, str(root))
        if world_size == 2:
            check_refusals(pool, root)
    loaded = merge([after for _, after in results])
    before = merge([earlier for earlier, _ in results])
    assert loaded.keys() == expected.keys()
    assert [key for key in expected if not equal(expected[key], loaded[key])] == []
    assert {f"partitioned.state.p{index}" for index in range(6)} < loaded.keys()
    assert not any(equal(before[f"model.odd.{index}"], loaded[f"model.odd.{index}"]) for index in range(5))


def test_four_ranks_export_the_full_model(saved: tuple[Path, Flat]) -> None:
    root, whole = saved
    files = sorted(Path(f"{root}-export").glob("*.safetensors"))
    assert len(files) > 2
    loaded: Flat = {}
    for file in files:
        loaded |= load_file(file)
    expected = {
        key.partition(".")[2]: value
        for key, value in whole.items()
        if key.split(".")[0] in ("model", "sharded")
    }
    assert loaded.keys() == expected.keys()
    assert [key for key in expected if not equal(expected[key], loaded[key])] == []


def check_refusals(pool: RankPool, root: Path) -> None:
    """Trouble on rank 1 is the same error on both ranks, and nothing is left of what was begun."""
    for how, text in (
        ("disk", r"OptionError: the checkpoint of 316\.4 KiB cannot be written .*rank 1: OSError"),
        ("shape", r"ValueError: w is float32\[11\] on rank 1"),
        ("own class", r"RuntimeError: OwnError: planted"),
        ("model", r"TargetError: .*not in the checkpoint: extra"),
    ):
        first, second = pool.run(refused, str(root), how)
        # A class that does not pickle reaches the other rank by its text.
        assert first.removeprefix("RuntimeError: ") == second
        assert re.match(text, first, re.DOTALL), first
        assert sorted(path.name for path in root.iterdir()) == ["latest", "step-4"]
