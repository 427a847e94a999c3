"""Work that all ranks of the default process group do together; one rank where there is none.

Whatever goes wrong on one rank is raised on every rank, so that none waits for another in a collective.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Done(Generic[T]):
    value: T


@dataclass(frozen=True, slots=True)
class _Raised:
    error: Exception


def count_ranks() -> int:
    """Return the size of the default process group, 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def own_rank() -> int:
    """Return this process's rank in the default process group, 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def _attempt(work: Callable[[], T]) -> _Done[T] | _Raised:
    try:
        return _Done(work())
    except Exception as error:  # raised again below, on every rank
        return _Raised(error)


def _portable(outcome: Any) -> Any:
    if isinstance(outcome, _Raised):
        try:
            pickle.loads(pickle.dumps(outcome.error))
        except Exception:  # an exception class that does not pickle still has its text
            return _Raised(RuntimeError(f"{type(outcome.error).__name__}: {outcome.error}"))
    return outcome


def on_first_rank(work: Callable[[], T]) -> T:
    """Return on every rank what `work` gives on rank 0; raise on every rank what it raises there."""
    outcome: _Done[T] | _Raised | None = _attempt(work) if own_rank() == 0 else None
    if dist.is_initialized():
        carried = [_portable(outcome)]
        dist.broadcast_object_list(carried, src=0)
        outcome = outcome if own_rank() == 0 else carried[0]
    assert outcome is not None
    if isinstance(outcome, _Raised):
        raise outcome.error
    return outcome.value


def on_every_rank(work: Callable[[], T]) -> list[T]:
    """Return what `work` gives on every rank, in their order; if any raises, all raise the lowest's error."""
    own = _attempt(work)
    outcomes: list[Any] = [own]
    if dist.is_initialized():
        outcomes = [None] * count_ranks()
        dist.all_gather_object(outcomes, _portable(own))
        outcomes[own_rank()] = own
    for outcome in outcomes:
        if isinstance(outcome, _Raised):
            raise outcome.error
    return [outcome.value for outcome in outcomes]


def gather_on_first(value: T) -> list[T]:
    """Return the values of every rank on rank 0, and nothing elsewhere."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] | None = [None] * count_ranks() if own_rank() == 0 else None
    dist.gather_object(value, values, dst=0)
    return values or []
