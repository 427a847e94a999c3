"""What a launch tells while it runs and when it is over."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..records import Event, StepRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """What happened since the last tick.

    `events` come from all ranks, `records` are new lines of `metrics.jsonl` (lines that a resumed run keeps
    come again), `output` is text that rank 0 wrote to either stream.
    """

    events: tuple[Event, ...] = ()
    records: tuple[StepRecord, ...] = ()
    output: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All ranks ended well. Units: `seconds` from the first process to the last end."""

    backend: str
    num_ranks: int
    seconds: float
    restarts: int
    log_dir: Path
    stop_requested: bool = False
