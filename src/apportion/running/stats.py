"""The few numbers that ranks exchange in every step: the loss, and proofs that they did the same thing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..errors import ParityError, TargetError
from .engine import Place


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """This rank's contribution. The three checksums (20 bits) must be equal on all ranks."""

    value: torch.Tensor
    samples: int
    stop: bool = False
    checksum: int = 0
    presence: int = 0
    buffers: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalStats:
    """The sums over ranks."""

    loss: float
    samples: int
    stop: bool


def exchange_stats(stats: StepStats, place: Place) -> GlobalStats:
    """Sum over ranks and compare the checksums; collective.

    By Cauchy and Schwarz, n values are equal exactly if n times the sum of squares is the square of the sum;
    20-bit numbers keep that exact in float64 for up to 2**12 ranks.
    Raises: TargetError if ranks were given different batches; ParityError if they did different things.
    """
    if place.num_ranks == 1:
        return GlobalStats(loss=float(stats.value), samples=stats.samples, stop=stats.stop)
    marks = [stats.checksum, stats.presence, stats.buffers]
    numbers = [float(stats.samples), float(stats.stop)]
    numbers += [float(mark) for mark in marks] + [float(mark * mark) for mark in marks]
    tail = torch.tensor(numbers, dtype=torch.float64, device=place.device)
    vector = torch.cat([stats.value.double().reshape(1).to(place.device), tail])
    dist.all_reduce(vector, group=place.group)
    sums = vector.tolist()
    equal = [place.num_ranks * sums[6 + i] == sums[3 + i] ** 2 for i in range(3)]
    if not equal[0]:
        raise TargetError(
            "the ranks were given different batches",
            found="step() takes the same global batch on every rank and cuts it itself",
            try_="iterate over session.loader(dataset), or pass every rank the whole batch",
        )
    if not equal[1]:
        raise ParityError(
            "the ranks have gradients for different parameters: the model's control flow differed between them",
            found="the example batch did not show it",
            try_="give an example batch that takes all branches, or --strategy ddp",
        )
    if not equal[2]:
        raise ParityError(
            "a buffer is stale: it must be the same on every rank and is not",
            found="the example batch did not show it",
            try_="give a more varied example batch",
        )
    return GlobalStats(loss=sums[0], samples=int(sums[1]), stop=sums[2] > 0)
