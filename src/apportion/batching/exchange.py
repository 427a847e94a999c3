"""How values of one part of a global batch meet those of the other parts.

One interface, four ways: on one device nothing is exchanged; between ranks by collectives; in the probe the
whole batch is recorded once and replayed to its parts, so that a split is proved exact in a single process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Positions `start:stop` of a global batch of `total` samples; empty for a padding part (weight 0)."""

    start: int
    stop: int
    total: int

    @property
    def num_samples(self) -> int:
        return self.stop - self.start

    @property
    def weight(self) -> float:
        """The part's share of the samples."""
        return self.num_samples / self.total


class Exchange(Protocol):
    """Sums over the parts of the batch."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of `tensor` over all parts; same shape and dtype, without gradient."""
        ...


class LocalExchange:
    """The batch is here as a whole."""

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@dataclass(slots=True)
class GroupExchange:
    """One part per rank of a process group."""

    group: dist.ProcessGroup | None = None

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total


@dataclass(slots=True)
class RecordingExchange:
    """Keeps what the whole batch would exchange, in call order."""

    values: list[torch.Tensor] = field(default_factory=list)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        self.values.append(tensor.detach().clone())
        return tensor


class ReplayError(RuntimeError):
    """A part exchanged other values than the whole batch did: its control flow depends on the data."""


@dataclass(slots=True)
class ReplayExchange:
    """Answers a part with the values that the whole batch had at the same call."""

    values: list[torch.Tensor]
    position: int = 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.position >= len(self.values) or self.values[self.position].shape != tensor.shape:
            raise ReplayError(f"exchange {self.position} of a part has no counterpart in the whole batch")
        value = self.values[self.position]
        self.position += 1
        return value.clone()


@dataclass(slots=True)
class CountingExchange:
    """Adds up what micro-batches exchange call by call, to be summed over ranks and replayed."""

    totals: list[torch.Tensor] = field(default_factory=list)
    position: int = 0

    def restart(self) -> None:
        """Begin the next micro-batch."""
        self.position = 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.position == len(self.totals):
            self.totals.append(torch.zeros_like(tensor))
        self.totals[self.position] += tensor
        self.position += 1
        return self.totals[self.position - 1].clone()


@dataclass(slots=True)
class DelayedExchange:
    """Answers each micro-batch with an estimate of the one count that the loss divides by.

    Gradients are then `estimate / true` too large or small by one known factor, which `correction` returns
    after the last micro-batch, so that no forward pass is needed only to count.
    """

    group: Exchange
    num_micro_batches: int
    estimate: torch.Tensor | None = None
    total: torch.Tensor | None = None

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.estimate is None or self.total is None:
            first = self.group.sum(tensor) * self.num_micro_batches
            self.estimate = torch.where(first > 0, first, torch.ones_like(first))
            self.total = torch.zeros_like(tensor)
        self.total = self.total + tensor.detach()
        return self.estimate

    def correction(self) -> float:
        """Return what gradients and loss are to be multiplied by; collective."""
        assert self.estimate is not None
        assert self.total is not None
        return float(self.estimate / self.group.sum(self.total))
