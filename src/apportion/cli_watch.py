"""A bar on the terminal for ranks that run in processes of their own."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console

from .launching import Tick
from .records import Job
from .reporting.progress import Progress

_LOG_LINE = "step: "  # how a rank, which has no terminal, tells of a step: the bar shows it already


class TerminalWatch:
    """Moves a bar with the ranks' step records and shows above it what else rank 0 says."""

    def __init__(self, job: Job) -> None:
        self._progress = Progress(job.steps or 0, console=Console(stderr=True), log_every=job.log_every)

    def __call__(self, tick: Tick) -> None:
        for record in tick.records:
            self._progress.on_step(record)
        for line in tick.output.splitlines():
            if line and not line.startswith(_LOG_LINE):
                self._progress.on_message(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.close()


def has_terminal() -> bool:
    """Say whether somebody is watching."""
    return sys.stderr.isatty()
