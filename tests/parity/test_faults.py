"""Planted faults: each is caught by the first-step check, before any step, and named; and by verify.

The faults are made in the running code of the ranks, so that the checks see them as they would see a bug.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import apportion.running.opening as opening
from apportion.applying import Applied
from apportion.errors import ParityError
from apportion.reading import JobParts
from apportion.records import Candidate, Job, Parity, ParityStatus, Strategy
from apportion.running.buffers import BufferKeeper
from apportion.running.engine import Engine
from apportion.running.opening import open_session
from apportion.running.verify import verify_rank
from parity_cases import candidate_for
from ranks import RankPool

pytestmark = pytest.mark.slow


class Tied(nn.Module):
    """A tied head, and a buffer that follows the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.mid = nn.Linear(6, 6)
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("ema", torch.zeros(6))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.mid(self.embed(ids)))
        with torch.no_grad():
            self.ema.lerp_(h.mean((0, 1)), 0.5)
        return self.head(h)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Tied()


def _batch(n: int = 8) -> Any:
    return (torch.randint(0, 12, (8, 5), generator=torch.Generator().manual_seed(1))[:n],)


def _parts() -> JobParts:
    return JobParts(
        name="tied",
        target="tied",
        model=_model,
        example=_batch,
        forward=lambda model, batch: model(*batch),
        loss=lambda output, batch: output.square().mean(),
        one_batch=True,
    )


def _dropped_all_reduce() -> Any:
    plain = Applied.synced
    return mock.patch.object(Applied, "synced", lambda self, sync: plain(self, False))


def _wrong_scale() -> Any:
    plain = Engine.run

    def run(self: Engine, share: Any, step: int, *, scale: float = 1.0) -> Any:
        return plain(self, share, step, scale=2 * scale)

    return mock.patch.object(Engine, "run", run)


def _skipped_micro_batch() -> Any:
    plain = Engine.run

    def run(self: Engine, share: Any, step: int, *, scale: float = 1.0) -> Any:
        return plain(self, replace(share, pieces=share.pieces[1:]), step, scale=scale)

    return mock.patch.object(Engine, "run", run)


def _untied_weight() -> Any:
    plain = opening.apply

    def apply(model: Any, *args: Any, **kwargs: Any) -> Applied:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        return plain(model, *args, **kwargs)

    return mock.patch.object(opening, "apply", apply)


def _stale_buffer() -> Any:
    return mock.patch.object(BufferKeeper, "finish", return_value=None)


FAULTS: dict[str, tuple[Callable[[], Any], int, str]] = {
    "a dropped all-reduce": (_dropped_all_reduce, 1, "all-reduce is missing"),
    "a wrong scale": (_wrong_scale, 1, "wrong scale"),
    "a skipped micro-batch": (_skipped_micro_batch, 2, "micro-batch was skipped"),
    "a tied weight come apart": (_untied_weight, 1, "tied weight came apart"),
    "a stale buffer": (_stale_buffer, 1, "stale"),
}


def _check(rank: int, fault: str | None, candidate: Candidate) -> str:
    """Open a session with the fault planted; return what the first-step check says of it."""
    with ExitStack() as stack:
        if fault is not None:
            stack.enter_context(FAULTS[fault][0]())
        try:
            open_session(_parts(), Job(target="tied", batch_size=8), candidate).close()
        except ParityError as error:
            return error.what
    return "equal"


def _verify(rank: int, fault: str, candidate: Candidate) -> Parity:
    with FAULTS[fault][0]():
        return verify_rank(_parts(), Job(target="tied", batch_size=8), candidate, 2)


@pytest.fixture(scope="module")
def pool() -> Any:
    with RankPool(2, timeout_s=200) as pool:
        yield pool


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_step_check_names_the_fault(pool: RankPool, fault: str) -> None:
    candidate = candidate_for(_parts(), Strategy.DDP, 2, num_micro=FAULTS[fault][1])
    said = pool.run(_check, fault, candidate)
    assert all(FAULTS[fault][2] in one for one in said), said


@pytest.mark.parametrize("fault", FAULTS)
def test_verify_names_the_fault(pool: RankPool, fault: str) -> None:
    candidate = candidate_for(_parts(), Strategy.DDP, 2, num_micro=FAULTS[fault][1])
    parity = pool.run(_verify, fault, candidate)[0]
    assert parity.status is ParityStatus.WRONG
    assert FAULTS[fault][2] in parity.reason


@pytest.mark.parametrize("num_micro", [1, 2])
@pytest.mark.parametrize("strategy", [Strategy.DDP, Strategy.FSDP], ids=lambda s: s.value)
def test_without_a_fault_the_check_passes(pool: RankPool, strategy: Strategy, num_micro: int) -> None:
    candidate = candidate_for(_parts(), strategy, 2, num_micro=num_micro)
    assert pool.run(_check, None, candidate) == ["equal", "equal"]
