"""The log line and the bar."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from reporting_samples import steps
from rich.console import Console

from apportion.records import StepRecord
from apportion.reporting import Progress, format_step
from apportion.reporting.progress import average

RECORD = StepRecord(
    step=10,
    epoch=0,
    loss=3.65334,
    grad_norm=1.2034,
    lr=1e-3,
    samples=64,
    seconds=0.5,
    tokens_per_second=5762.3,
    mfu=0.303,
    memory=int(12.31 * 2**30),
    tflops=300.1,
)


def run(records: tuple[StepRecord, ...], *, total: int, terminal: bool = False, log_every: int = 10) -> str:
    stream = StringIO()
    console = Console(file=stream, width=100 if terminal else 30, force_terminal=terminal)
    with Progress(total, console=console, log_every=log_every) as progress:
        for record in records:
            progress.on_step(record)
        progress.on_validation(5, {"loss": 1.5, "accuracy": 0.25})
        progress.on_checkpoint(Path("runs/a/checkpoints/step-5"))
        progress.on_message("[bold]a message[/bold] of :smile: more than thirty columns")
    progress.close()
    return stream.getvalue()


def test_log_line_has_the_known_shape() -> None:
    line = format_step(RECORD, device_bytes=int(12.31 * 2**30 / 0.154))
    assert line == (
        "step: 10  loss: 3.65334  grad_norm: 1.2034  memory: 12.31GiB(15.40%)  tps: 5,762  tflops: 300.1  "
        "mfu: 30.3%"
    )


def test_log_line_without_tokens_peak_or_limit() -> None:
    line = format_step(replace(RECORD, tokens_per_second=0.0, mfu=0.0, tflops=0.0123))
    assert "memory: 12.31GiB  sps: 128  tflops: 0.0123  mfu: n/a" in line


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (float("nan"), "loss: nan "),
        (float("inf"), "loss: inf "),
        (2e-7, "loss: 2.0000e-07 "),
        (0.0, "loss: 0.00000 "),
    ],
)
def test_unusual_losses(loss: float, text: str) -> None:
    assert text in format_step(replace(RECORD, loss=loss))


def test_lines_come_first_every_log_every_and_last() -> None:
    text = run(steps(25), total=25)
    assert re.findall(r"^step: (\d+)  ", text, flags=re.MULTILINE) == ["1", "10", "20", "25"]


def test_lines_after_a_resume() -> None:
    text = run(steps(10, start=16), total=30)
    assert re.findall(r"^step: (\d+)  ", text, flags=re.MULTILINE) == ["20"]


def test_messages_are_printed_as_they_are_and_unbroken() -> None:
    lines = run((), total=10).splitlines()
    assert lines == [
        "validation: 5  loss: 1.50000  accuracy: 0.25000",
        "checkpoint: runs/a/checkpoints/step-5",
        "[bold]a message[/bold] of :smile: more than thirty columns",
    ]


def test_rates_are_those_since_the_last_line() -> None:
    fast = replace(RECORD, seconds=1.0, tokens_per_second=300.0, memory=5)
    slow = replace(RECORD, seconds=3.0, tokens_per_second=100.0, memory=3, loss=1.0)
    both = average([fast, slow])
    assert both.tokens_per_second == pytest.approx((300 + 300) / 4)
    assert (both.loss, both.memory, both.samples, both.seconds) == (1.0, 5, 128, 4.0)
    assert average([replace(RECORD, seconds=0.0)]).seconds == 0.0


def test_bar_shows_step_loss_and_rate() -> None:
    text = run(steps(20), total=40, terminal=True)
    assert "step 20/40" in text
    assert "tokens/s" in text
    assert "ETA" in text
    assert "step: 20" not in text
    assert "checkpoint: runs/a" in text


def test_bar_without_a_known_end() -> None:
    assert "step 20" in run(steps(20), total=0, terminal=True)
