"""Layouts beside those of two ranks: hybrid sharding over four, several devices in one process, one device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from apportion.applying.placing import _balance, place
from apportion.errors import PlanError
from apportion.reading import JobParts
from apportion.records import Candidate, Job, Mesh, Parity, ParityStatus, Strategy
from apportion.running.verify import verify_rank
from parity_cases import candidate_for
from ranks import RankPool


class Stack(nn.Module):
    """Residual blocks around a tied table; what lies between blocks mixes their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Stack()


def _parts() -> JobParts:
    ids = torch.randint(0, 10, (8, 5), generator=torch.Generator().manual_seed(1))
    return JobParts(
        name="stack",
        target="stack",
        model=_model,
        example=lambda n: (ids[:n],),
        forward=lambda model, batch: model(*batch),
        loss=lambda output, batch: nn.functional.cross_entropy(output.flatten(0, 1), batch[0].flatten()),
        one_batch=True,
    )


def _verify(rank: int, candidate: Candidate) -> Parity:
    return verify_rank(_parts(), Job(target="stack", batch_size=8), candidate, 3)


@pytest.mark.slow
def test_hybrid_sharding_over_four_ranks() -> None:
    flat = candidate_for(_parts(), Strategy.FSDP, 4)
    mesh = Mesh(dp_replicate=2, dp_shard=2)
    hybrid = Candidate(
        name="hsdp",
        strategy=Strategy.HSDP,
        mesh=mesh,
        micro_batch_size=2,
        grad_accumulation=1,
        stages=flat.stages,
        estimate=flat.estimate,
    )
    with RankPool(4, timeout_s=200) as pool:
        parity = pool.run(_verify, hybrid)[0]
    assert parity.status is ParityStatus.EQUAL, parity
    assert parity.world_size == 4


@pytest.mark.parametrize("strategy", [Strategy.NAIVE, Strategy.SINGLE], ids=lambda s: s.value)
def test_one_process(strategy: Strategy) -> None:
    ranks = 2 if strategy is Strategy.NAIVE else 1
    parity = _verify(0, candidate_for(_parts(), strategy, ranks))
    assert parity.status is ParityStatus.EQUAL, parity


def test_blocks_are_spread_and_shared_ones_stay() -> None:
    model = _model()
    names = ["embed", *(f"blocks.{i}" for i in range(4)), "head"]
    cpu = torch.device("cpu")
    handles = place(model, names, [cpu, cpu])
    assert len(handles) == 2 * 4  # the tied table and head stay together, unmoved
    with pytest.raises(PlanError, match="5 devices"):
        place(_model(), names, [cpu] * 5)


@pytest.mark.parametrize(
    ("sizes", "devices"), [([1] * 7, 3), ([100, 1, 1, 1], 3), ([1, 1, 100], 2), ([5, 5], 2)]
)
def test_balance_is_contiguous_and_leaves_no_device_empty(sizes: list[int], devices: int) -> None:
    places = _balance(sizes, devices)
    assert places == sorted(places)
    assert set(places) == set(range(devices))
