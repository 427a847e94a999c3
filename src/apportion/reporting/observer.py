"""Who is told what happens while a run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from ..records import StepRecord


class Observer(Protocol):
    """Told of every step, validation, checkpoint and message of a run, on rank 0, in order."""

    def on_step(self, record: StepRecord) -> None:
        """Called after each optimizer step."""

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after a validation, with its means over every sample."""

    def on_checkpoint(self, path: Path) -> None:
        """Called once a checkpoint is durable."""

    def on_message(self, text: str) -> None:
        """Called with something the user should read."""

    def close(self) -> None:
        """Called once at the end, also after an error."""
