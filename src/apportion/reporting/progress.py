"""Training as it is watched: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from ..records import StepRecord
from .figures import format_loss, format_rate, format_share


def format_step(record: StepRecord, *, device_bytes: int = 0) -> str:
    """Return the log line of a step: `step: 10  loss: 3.65334  grad_norm: 1.2034  memory: 12.31GiB(15.40%)  …`.

    `tps` (tokens per second) is `sps` (samples per second) where the samples have no tokens; the share of
    `device_bytes` is left out where that is 0, and `mfu` is `n/a` where the peak is not known.
    """
    share = f"({record.memory / device_bytes:.2%})" if device_bytes else ""
    if record.tokens_per_second:
        speed = f"tps: {format_rate(record.tokens_per_second)}"
    else:
        speed = f"sps: {format_rate(_samples_per_second(record))}"
    tflops = f"{record.tflops:.1f}" if record.tflops >= 10 or not record.tflops else f"{record.tflops:.3g}"
    return "  ".join(
        (
            f"step: {record.step}",
            f"loss: {format_loss(record.loss)}",
            f"grad_norm: {record.grad_norm:.4f}",
            f"memory: {record.memory / 2**30:.2f}GiB{share}",
            speed,
            f"tflops: {tflops}",
            f"mfu: {record.mfu:.1%}" if record.mfu else "mfu: n/a",
        )
    )


def average(records: list[StepRecord]) -> StepRecord:
    """Return the last of the records with the rates of all of them, weighted by time."""
    last = records[-1]
    seconds = sum(record.seconds for record in records)
    if not seconds:
        return last

    def mean(values: list[float]) -> float:
        return sum(v * record.seconds for v, record in zip(values, records, strict=True)) / seconds

    return StepRecord(
        step=last.step,
        epoch=last.epoch,
        loss=last.loss,
        grad_norm=last.grad_norm,
        lr=last.lr,
        samples=sum(record.samples for record in records),
        seconds=seconds,
        tokens_per_second=mean([record.tokens_per_second for record in records]),
        mfu=mean([record.mfu for record in records]),
        memory=max(record.memory for record in records),
        tflops=mean([record.tflops for record in records]),
    )


class Progress:
    """An Observer that shows a bar where `console` is a terminal and prints log lines elsewhere.

    Log lines come for the first step, every `log_every` steps and the last, and carry the rates since the
    line before. `total_steps` is 0 where the end is not known; `start_step` is the step resumed from.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        console: Console | None = None,
        log_every: int = 10,
        device_bytes: int = 0,
        start_step: int = 0,
    ) -> None:
        self._total = total_steps
        self._console = Console(stderr=True) if console is None else console
        self._log_every = max(log_every, 1)
        self._device_bytes = device_bytes
        self._since: list[StepRecord] = []
        self._bar = _make_bar(self._console) if self._console.is_terminal else None
        if self._bar is not None:
            self._task = self._bar.add_task(
                "train",
                total=total_steps or None,
                completed=start_step,
                steps=self._steps(start_step),
                figures="starting",
            )
            self._bar.start()

    def on_step(self, record: StepRecord) -> None:
        """Move the bar, or print a line when one is due."""
        if self._bar is not None:
            steps = self._steps(record.step)
            self._bar.update(self._task, completed=record.step, steps=steps, figures=_figures(record))
            return
        self._since.append(record)
        if record.step == 1 or record.step % self._log_every == 0 or record.step == self._total:
            self._print(format_step(average(self._since), device_bytes=self._device_bytes))
            self._since = []

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the metrics of a validation."""
        figures = "  ".join(f"{name}: {format_loss(value)}" for name, value in metrics.items())
        self._print(f"validation: {step}  {figures}")

    def on_checkpoint(self, path: Path) -> None:
        """Print where a checkpoint is."""
        self._print(f"checkpoint: {path}")

    def on_message(self, text: str) -> None:
        """Print a message as it is."""
        self._print(text)

    def close(self) -> None:
        """Leave the bar as it stands and give the terminal back; a second call does nothing."""
        if self._bar is not None:
            self._bar.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _steps(self, step: int) -> str:
        return f"{step:,}/{self._total:,}" if self._total else f"{step:,}"

    def _print(self, line: str) -> None:
        """Print a line unbroken and unstyled, above the bar where there is one."""
        self._console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)
        self._console.file.flush()


def _make_bar(console: Console) -> Bar:
    return Bar(
        TextColumn("step {task.fields[steps]}", markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[figures]}", markup=False),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console,
        expand=True,
        refresh_per_second=4,
    )


def _figures(record: StepRecord) -> str:
    tokens = record.tokens_per_second
    rate = tokens or _samples_per_second(record)
    mfu = f"  mfu {format_share(record.mfu)}" if record.mfu else ""
    return f"loss {format_loss(record.loss)}  {format_rate(rate)} {'tokens' if tokens else 'samples'}/s{mfu}"


def _samples_per_second(record: StepRecord) -> float:
    return record.samples / record.seconds if record.seconds else math.nan
