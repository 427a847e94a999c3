"""What a run leaves behind per step: `metrics.jsonl`, `validation.jsonl` and TensorBoard events."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..errors import OptionError
from ..records import StepRecord, from_json_text, to_json_text

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS_FILE = "metrics.jsonl"
VALIDATION_FILE = "validation.jsonl"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """A line of `validation.jsonl`: the means over every validation sample after `step` steps."""

    step: int
    metrics: Mapping[str, float]


class MetricsWriter:
    """An Observer that writes one line per step and per validation, each flushed as it is written.

    Floats are written so that reading gives the same float back, hence equal losses are equal text; values
    that are not finite are `NaN` and `Infinity`, as Python's json reads them. With `resume_step` (the step of
    the checkpoint, 0 for a new run) lines of later steps, and a last line that was cut, are dropped first.
    """

    def __init__(self, run_dir: Path, *, resume_step: int = 0) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        keep_until(run_dir / METRICS_FILE, StepRecord, lambda record: record.step <= resume_step)
        keep_until(run_dir / VALIDATION_FILE, Validation, lambda record: record.step <= resume_step)
        self._metrics = (run_dir / METRICS_FILE).open("a", encoding="utf-8")
        self._validation = (run_dir / VALIDATION_FILE).open("a", encoding="utf-8")
        self._board = _open_board(run_dir / "tensorboard", purge_step=resume_step + 1)

    def on_step(self, record: StepRecord) -> None:
        """Write the record."""
        self._metrics.write(to_json_text(record, indent=None) + "\n")
        self._metrics.flush()
        for tag, value in _scalars(record):
            self._board.add_scalar(tag, value, record.step)

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of a validation."""
        line = to_json_text(Validation(step=step, metrics=metrics), indent=None)
        self._validation.write(line + "\n")
        self._validation.flush()
        for name, value in metrics.items():
            self._board.add_scalar(f"validation/{name}", value, step)

    def on_checkpoint(self, path: Path) -> None:
        """Write nothing: a checkpoint describes itself."""

    def on_message(self, text: str) -> None:
        """Add the message to TensorBoard's text."""
        self._board.add_text("messages", text)

    def close(self) -> None:
        """Close the files; a second call does nothing."""
        self._metrics.close()
        self._validation.close()
        self._board.close()


def read_metrics(run_dir: Path) -> tuple[StepRecord, ...]:
    """Return the steps of a run in the order written; none where the run has written none.

    A last line that was cut while being written is left out.
    Raises: OptionError naming the line that is damaged.
    """
    return read_lines(run_dir / METRICS_FILE, StepRecord)


def read_validation(run_dir: Path) -> tuple[Validation, ...]:
    """Return the validations of a run in the order written. Raises as `read_metrics`."""
    return read_lines(run_dir / VALIDATION_FILE, Validation)


def read_lines(path: Path, cls: type[T]) -> tuple[T, ...]:
    """Return the records of a file of JSON lines; () where there is no file. Raises as `read_metrics`."""
    if not path.exists():
        return ()
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            records.append(from_json_text(cls, line.decode("utf-8")))
        except (OptionError, UnicodeDecodeError) as error:
            raise OptionError(
                f"{path} is damaged in line {number}",
                found=str(error).splitlines()[0],
                try_="restore the file, or start in a new run directory",
            ) from error
    # What follows the last newline was cut while being written.
    return tuple(records)


def keep_until(path: Path, cls: type[T], wanted: Callable[[T], bool]) -> None:
    """Rewrite a file of JSON lines with only the wanted records; the old file stays until the new is whole.

    Raises: OptionError as `read_metrics`.
    """
    if not path.exists():
        return
    text = "".join(to_json_text(item, indent=None) + "\n" for item in read_lines(path, cls) if wanted(item))
    beside = path.with_name(path.name + ".new")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _scalars(record: StepRecord) -> tuple[tuple[str, float], ...]:
    return (
        ("train/loss", record.loss),
        ("train/grad_norm", record.grad_norm),
        ("train/lr", record.lr),
        ("speed/step_seconds", record.seconds),
        ("speed/samples_per_second", record.samples / record.seconds if record.seconds else 0.0),
        ("speed/tokens_per_second", record.tokens_per_second),
        ("speed/mfu", record.mfu),
        ("memory/peak_bytes", float(record.memory)),
    )


def _open_board(path: Path, *, purge_step: int) -> SummaryWriter:
    """Return a TensorBoard writer; viewers forget what earlier runs wrote there from `purge_step` on."""
    # Importing it takes a quarter of a second and only rank 0 needs it.
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(path), purge_step=purge_step)
