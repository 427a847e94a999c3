"""metrics.jsonl, validation.jsonl and TensorBoard: round trips and resuming."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reporting_samples import steps

from apportion.errors import OptionError
from apportion.records import StepRecord, from_json_text, to_json_text
from apportion.reporting import MetricsWriter, read_metrics, read_validation


def write(run_dir: Path, records: tuple[StepRecord, ...], *, resume_step: int = 0) -> None:
    writer = MetricsWriter(run_dir, resume_step=resume_step)
    for record in records:
        writer.on_step(record)
        if record.step % 5 == 0:
            writer.on_validation(record.step, {"loss": record.loss + 0.1})
    writer.close()
    writer.close()


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    write(tmp_path, steps(12))
    assert read_metrics(tmp_path) == steps(12)
    assert [(item.step, item.metrics["loss"]) for item in read_validation(tmp_path)] == [
        (record.step, record.loss + 0.1) for record in steps(12) if record.step % 5 == 0
    ]


def test_a_line_holds_what_outsiders_read(tmp_path: Path) -> None:
    write(tmp_path, steps(1))
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    promised = {"step", "loss", "grad_norm", "samples", "seconds", "tokens_per_second", "mfu", "memory"}
    assert promised <= set(line)


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_losses_are_equal_text_just_when_they_are_equal_bits(one: float, other: float) -> None:
    texts = [to_json_text(replace(steps(1)[0], loss=loss), indent=None) for loss in (one, other)]
    assert (texts[0] == texts[1]) == (one.hex() == other.hex())
    assert from_json_text(StepRecord, texts[0]).loss.hex() == one.hex()


def test_lines_are_there_before_the_writer_is_closed(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, resume_step=0)
    writer.on_step(steps(1)[0])
    writer.on_validation(1, {"loss": 2.0})
    assert len(read_metrics(tmp_path)) == len(read_validation(tmp_path)) == 1
    writer.close()


def test_not_finite_values_come_back(tmp_path: Path) -> None:
    record = replace(steps(1)[0], loss=float("nan"), grad_norm=float("inf"))
    write(tmp_path, (record,))
    (back,) = read_metrics(tmp_path)
    assert math.isnan(back.loss)
    assert back.grad_norm == float("inf")


def test_resume_drops_later_steps_and_gives_the_file_of_an_unbroken_run(tmp_path: Path) -> None:
    write(tmp_path / "whole", steps(20))
    write(tmp_path / "broken", steps(14))
    write(tmp_path / "broken", steps(10, start=11), resume_step=10)
    for name in ("metrics.jsonl", "validation.jsonl"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_resume_drops_a_line_that_was_cut(tmp_path: Path) -> None:
    write(tmp_path, steps(5))
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert read_metrics(tmp_path) == steps(4)
    write(tmp_path, steps(1, start=5), resume_step=4)
    assert path.read_bytes() == whole


def test_a_last_line_cut_inside_a_character_is_dropped(tmp_path: Path) -> None:
    write(tmp_path, steps(2))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write('{"step": "é'.encode()[:-1])
    assert read_metrics(tmp_path) == steps(2)


def test_a_new_run_starts_empty(tmp_path: Path) -> None:
    write(tmp_path, steps(5))
    write(tmp_path, steps(2))
    assert read_metrics(tmp_path) == steps(2)


@pytest.mark.parametrize("damage", [b'{"step": 1}\n', b"not json\n", b"\xff\xfe\n", b"\n"])
def test_damage_inside_is_an_error_that_names_the_line(tmp_path: Path, damage: bytes) -> None:
    write(tmp_path, steps(3))
    path = tmp_path / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + damage + lines[2])
    before = path.read_bytes()
    with pytest.raises(OptionError, match="damaged in line 2"):
        read_metrics(tmp_path)
    with pytest.raises(OptionError, match="damaged in line 2"):
        MetricsWriter(tmp_path, resume_step=1)
    assert path.read_bytes() == before


def test_no_file_is_no_steps(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == ()
    assert read_validation(tmp_path) == ()


def test_tensorboard_forgets_the_steps_after_the_checkpoint(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, tuple(replace(record, loss=1.0) for record in steps(8)))
    write(tmp_path, tuple(replace(record, loss=2.0) for record in steps(2, start=5)), resume_step=4)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert found == [(1, 1.0), (2, 1.0), (3, 1.0), (4, 1.0), (5, 2.0), (6, 2.0)]
    assert "validation/loss" in events.Tags()["scalars"]
