"""Sessions over several ranks: a loop of the user's own, saving and resuming, precision, recomputation."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apportion import parallelize
from apportion.reading import JobParts
from apportion.records import Candidate, Checkpointing, Job, Parity, ParityStatus, Precision, Strategy
from apportion.running.session import Session
from apportion.running.verify import verify_rank
from parity_cases import candidate_for
from ranks import RankPool

pytestmark = pytest.mark.slow


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.linear(self.norm(x))))


class Net(nn.Module):
    """Batch-norm, dropout and a stack of blocks: everything that a second forward can spoil."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Towers(nn.Module):
    """Two towers and a learnt temperature, for a loss over the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 5), nn.Linear(8, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"left": self.left(x), "right": self.right(y), "scale": self.scale.exp()}


def _contrast(output: dict[str, torch.Tensor], batch: Any) -> torch.Tensor:
    logits = output["scale"] * F.normalize(output["left"]) @ F.normalize(output["right"]).T
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def _seeded(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def _data(n: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(10, 8, generator=generator)[:n] + 1, torch.randn(10, 8, generator=generator)[:n]


def _net_parts() -> JobParts:
    return JobParts(
        name="net",
        target="net",
        model=lambda: _seeded(Net),
        example=_data,
        forward=lambda model, batch: model(batch[0]),
        loss=lambda output, batch: (output - batch[1][:, :4]).square().mean(),
        one_batch=True,
    )


def _towers_parts() -> JobParts:
    return JobParts(
        name="towers",
        target="towers",
        model=lambda: _seeded(Towers),
        example=_data,
        forward=lambda model, batch: model(*batch),
        loss=_contrast,
        one_batch=True,
    )


PARTS = {"net": _net_parts, "towers": _towers_parts}


def _verify(rank: int, name: str, candidate: Candidate, clip: float | None) -> Parity:
    job = Job(target=name, batch_size=10, optimizer="adamw", lr=1e-3, clip_norm=clip)
    return verify_rank(PARTS[name](), job, candidate, 3)


@pytest.fixture(scope="module")
def pool() -> Any:
    with RankPool(3, timeout_s=300) as pool:
        yield pool


@pytest.mark.parametrize("strategy", [Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2, Strategy.FSDP])
@pytest.mark.parametrize("mode", list(Checkpointing), ids=lambda mode: mode.value)
def test_recomputed_blocks_draw_and_count_once(pool: RankPool, strategy: Strategy, mode: Checkpointing) -> None:
    candidate = replace(candidate_for(_net_parts(), strategy, 3), activation_checkpointing=mode)
    parity = pool.run(_verify, "net", candidate, 0.1)[0]
    assert parity.status is ParityStatus.EQUAL, parity


@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize("strategy", [Strategy.DDP, Strategy.FSDP], ids=lambda s: s.value)
def test_a_loss_over_the_whole_batch(pool: RankPool, strategy: Strategy, num_micro: int) -> None:
    candidate = candidate_for(_towers_parts(), strategy, 3, num_micro=num_micro)
    parity = pool.run(_verify, "towers", candidate, None)[0]
    assert parity.status is ParityStatus.EQUAL, parity


@pytest.mark.parametrize("strategy", [Strategy.DDP, Strategy.FSDP], ids=lambda s: s.value)
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16], ids=lambda p: p.value)
def test_low_precision_is_within_its_bound(pool: RankPool, strategy: Strategy, precision: Precision) -> None:
    candidate = replace(candidate_for(_net_parts(), strategy, 3), precision=precision)
    parity = pool.run(_verify, "net", candidate, None)[0]
    assert parity.status is ParityStatus.EQUAL, parity
    assert parity.tolerance > 1e-3


# ---- saving and resuming


def _session(strategy: str) -> Session:
    model = _seeded(Net)
    groups = [
        {"params": [p for n, p in model.named_parameters() if n.endswith("bias")], "weight_decay": 0.0},
        {"params": [p for n, p in model.named_parameters() if not n.endswith("bias")], "lr": 3e-3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return parallelize(
        model,
        optimizer,
        loss=lambda output, batch: (output - batch[1][:, :4]).square().mean(),
        forward=lambda model, batch: model(batch[0]),
        example=_data(),
        plan=strategy,
        schedule=schedule,
    )


def _dataset() -> list[tuple[torch.Tensor, torch.Tensor]]:
    x, y = _data()
    return [(x[i % 10] * (1 + i / 20), y[i % 10]) for i in range(23)]


def _losses(session: Session, loader: Any, steps: int) -> list[float]:
    found: list[float] = []
    while len(found) < steps:
        for portion in loader:
            found.append(session.step(portion).loss)
            if len(found) == steps:
                break
    return found


def _save_at(rank: int, strategy: str, root: str, before: int, after: int) -> list[float]:
    session = _session(strategy)
    loader = session.loader(_dataset(), batch_size=5)
    losses = _losses(session, loader, before)
    session.save(root)
    losses += _losses(session, loader, after)
    session.close()
    return losses


def _resume(
    rank: int, strategy: str, root: str, steps: int
) -> tuple[list[float], dict[str, float], list[float]]:
    session = _session(strategy)
    loader = session.loader(_dataset(), batch_size=5)
    session.load(root)
    losses = _losses(session, loader, steps)
    rates = [group["lr"] for group in session.optimizer.param_groups]
    evaluated = session.evaluate(session.loader(_dataset(), batch_size=5, shuffle=False))
    session.close()
    return losses, evaluated, rates


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "fsdp"])
def test_resumed_runs_carry_on(tmp_path: Path, strategy: str) -> None:
    root = str(tmp_path / "checkpoints")
    with RankPool(2, timeout_s=200) as two:
        through = two.run(_save_at, strategy, root, 3, 5)[0]
        again, evaluated, rates = two.run(_resume, strategy, root, 5)[0]
    assert again == through[3:]
    with RankPool(3, timeout_s=200) as three:
        other, elsewhere, other_rates = three.run(_resume, "fsdp" if strategy == "ddp" else "ddp", root, 5)[0]
    assert other == pytest.approx(through[3:], rel=1e-5)
    assert elsewhere["loss"] == pytest.approx(evaluated["loss"], rel=1e-5)
    assert rates == other_rates == [1e-3 * 0.5**4, 3e-3 * 0.5**4]


SCRIPT = """
import torch, apportion
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loss = lambda output, batch: nn.functional.cross_entropy(output, batch[1])
generator = torch.Generator().manual_seed(1)
dataset = [(torch.randn(8, generator=generator), i % 3) for i in range(26)]
batch = (torch.stack([x for x, _ in dataset[:8]]), torch.tensor([y for _, y in dataset[:8]]))
session = apportion.parallelize(model, optimizer, loss=loss, example=batch, plan="auto")
for batch in session.loader(dataset, batch_size=8):
    result = session.step(batch)
    if session.rank == 0:
        print("loss", repr(result.loss), flush=True)
"""


def _script_losses(path: Path, command: list[str]) -> list[float]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(
        [sys.executable, *command, str(path)], capture_output=True, text=True, env=env, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss")]


def test_an_ordinary_script_under_torchrun(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    alone = _script_losses(path, [])
    ranks = _script_losses(path, ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"])
    assert len(alone) == 4
    assert ranks == pytest.approx(alone, rel=1e-5)


def _different_batches(rank: int) -> str:
    session = _session("ddp")
    try:
        session.step(tuple(t + rank for t in _data()))
    except Exception as error:  # whatever is said to the user is what is asserted
        return str(error)
    return "accepted"


def test_ranks_with_different_batches_are_told(pool: RankPool) -> None:
    assert all("different batches" in said for said in pool.run(_different_batches))
