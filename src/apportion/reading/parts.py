"""The callables of a job, whichever form the user's file has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

Batch = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class JobParts:
    """What a target brings, with the defaults filled in.

    `model()` builds the module (under `torch.device("meta")` too); `example()` returns one global batch of
    `n` samples or fewer; `data(split)` is None for a one-batch job. `loss(output, batch)` returns a scalar or
    `(total, count)`; it is None where the model computes its own (`output.loss`). `batch_dims` gives the
    batch axis of each leaf of a batch (in pytree order; None = not split) or is None where it is to be
    found. `optimizer` and `schedule` are None where the job leaves them to us.
    """

    name: str
    target: str
    model: Callable[[], nn.Module]
    example: Callable[[int], Batch]
    forward: Callable[[nn.Module, Batch], Any]
    loss: Callable[[Any, Batch], Any] | None
    data: Callable[[str], Iterable[Any]] | None = None
    collate: Callable[[list[Any]], Batch] | None = None
    optimizer: Callable[[Iterable[Any]], Optimizer] | None = None
    schedule: Callable[[Optimizer], Any] | None = None
    metrics: Callable[[Any, Batch], dict[str, Any]] | None = None
    batch_dims: tuple[int | None, ...] | None = None
    tokens_per_sample: int = 0
    one_batch: bool = False
    fingerprint: str = ""
