"""The bar of a terminal: fed by step records, beside what rank 0 says."""

from __future__ import annotations

import io
from unittest import mock

from rich.console import Console

from apportion import cli_watch
from apportion.launching import Tick
from apportion.records import Job, StepRecord


def test_records_move_the_bar_and_other_lines_stand_above_it() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100)
    record = StepRecord(
        step=7,
        epoch=0,
        loss=1.25,
        grad_norm=0.5,
        lr=0.1,
        samples=8,
        seconds=0.1,
        tokens_per_second=0.0,
        mfu=0.0,
        memory=1,
    )
    faked = mock.patch.object(cli_watch, "Console", return_value=console)
    with faked, cli_watch.TerminalWatch(Job(target="job.py", steps=10)) as watch:
        watch(Tick(records=(record,), output="step: 7  loss: 1.25\ncorpus: 3 files\n"))
    shown = screen.getvalue()
    assert "7/10" in shown
    assert "loss 1.25" in shown
    assert "corpus: 3 files" in shown
    assert "step: 7" not in shown
