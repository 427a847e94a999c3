"""The training loop, on a session that only counts: which steps, validations and saves happen, and when."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from apportion.errors import OptionError, TargetError
from apportion.reading import JobParts
from apportion.records import (
    Candidate,
    ClusterSummary,
    Estimate,
    Job,
    Memory,
    Mesh,
    ModelSummary,
    Phase,
    Plan,
    Seconds,
    StepRecord,
    Strategy,
    TrainResult,
    from_json_text,
)
from apportion.running.run_dir import claim_run_dir
from apportion.running.session import StepResult
from apportion.running.train import Rates, train_rank

NUM_SAMPLES = 10
CANDIDATE = Candidate(
    name="ddp",
    strategy=Strategy.DDP,
    mesh=Mesh(dp_replicate=2),
    micro_batch_size=2,
    grad_accumulation=1,
    estimate=Estimate(
        step_seconds=0.5,
        samples_per_second=8.0,
        tokens_per_second=0.0,
        tflops_per_device=2.0,
        mfu=0.25,
        seconds=Seconds(compute=0.5),
        memory_bytes=Memory(),
    ),
)


class CountingLoader:
    """Batches that are their sample counts; 10 samples in batches of 4 are 4, 4 and 2."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.epoch = 0
        self.position = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < NUM_SAMPLES:
            size = min(self.batch_size, NUM_SAMPLES - self.position)
            self.position += size
            yield size
        self.epoch, self.position = self.epoch + 1, 0


class CountingSession:
    """Its loss is 1 / step; it stops when `stop_at` is reached; a checkpoint is the loader's place."""

    world_size = 2
    parity = None

    def __init__(self, stop_at: int = 0) -> None:
        self.num_steps = 0
        self.stop_at = stop_at
        self.loaders: list[CountingLoader] = []
        self.saves: list[int] = []
        self.evaluations: list[tuple[int, int]] = []

    def loader(self, dataset: Any, **options: Any) -> CountingLoader:
        self.loaders.append(CountingLoader(options["batch_size"]))
        return self.loaders[-1]

    def step(self, batch: int) -> StepResult:
        self.num_steps += 1
        return StepResult(
            step=self.num_steps,
            loss=1 / self.num_steps,
            grad_norm=1.0,
            samples=batch,
            lr=0.1,
            epoch=self.loaders[0].epoch,
            memory_bytes=1000,
            stop=self.num_steps == self.stop_at,
        )

    def evaluate(self, loader: Iterable[int], metrics: Any = None) -> dict[str, float]:
        self.evaluations.append((self.num_steps, sum(loader)))
        return {"loss": 0.5}

    def save(self, root: Path) -> Path:
        self.saves.append(self.num_steps)
        path = root / f"step-{self.num_steps}"
        path.mkdir(parents=True)
        place = (self.num_steps, self.loaders[0].epoch, self.loaders[0].position)
        (path / "place.json").write_text(json.dumps(place))
        return path

    def load(self, root: Path) -> None:
        place = json.loads((root / "place.json").read_text())
        self.num_steps, self.loaders[0].epoch, self.loaders[0].position = place


class Told:
    """An observer that keeps everything."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.validations: list[int] = []
        self.checkpoints: list[str] = []
        self.messages: list[str] = []

    def on_step(self, record: StepRecord) -> None:
        self.records.append(record)

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.validations.append(step)

    def on_checkpoint(self, path: Path) -> None:
        self.checkpoints.append(path.name)

    def on_message(self, text: str) -> None:
        self.messages.append(text)


def parts(validation: Any = None) -> JobParts:
    def data(split: str) -> Any:
        if split == "train":
            return range(NUM_SAMPLES)
        if isinstance(validation, Exception):
            raise validation
        return validation

    return JobParts(
        name="job",
        target="job.py",
        model=lambda: nn.Linear(1, 1),
        example=lambda n: n,
        forward=lambda model, batch: batch,
        loss=None,
        data=data,
        tokens_per_sample=8,
    )


def run(
    tmp_path: Path,
    session: CountingSession,
    *,
    validation: Any = None,
    resume_from: Path | None = None,
    **options: Any,
) -> tuple[TrainResult, Told, list[tuple[int, Phase]]]:
    job = Job(target="job.py", batch_size=4, run_dir=str(tmp_path), **options)
    told, beats = Told(), list[tuple[int, Phase]]()
    result = train_rank(
        parts(validation),
        job,
        CANDIDATE,
        session,
        [told],
        beat=lambda step, phase: beats.append((step, phase)),
        resume_from=resume_from,
    )
    return result, told, beats


def test_epochs_give_every_batch_once_and_one_save(tmp_path: Path) -> None:
    session = CountingSession()
    result, told, _ = run(tmp_path, session, epochs=2)
    assert [record.samples for record in told.records] == [4, 4, 2, 4, 4, 2]
    assert [record.epoch for record in told.records] == [0, 0, 0, 1, 1, 1]
    assert session.saves == [6]
    assert (result.step, result.loss, result.stopped) == (6, 1 / 6, False)
    assert result.checkpoint.endswith("checkpoints/step-6")


def test_steps_win_over_epochs(tmp_path: Path) -> None:
    session = CountingSession()
    result, told, _ = run(tmp_path, session, steps=5, epochs=1)
    assert [record.step for record in told.records] == [1, 2, 3, 4, 5]
    assert result.step == 5


def test_saves_every_n_steps_and_not_twice_at_the_end(tmp_path: Path) -> None:
    session = CountingSession()
    _, told, _ = run(tmp_path, session, steps=6, save_every=2)
    assert session.saves == [2, 4, 6]
    assert told.checkpoints == ["step-2", "step-4", "step-6"]


def test_validates_every_n_steps_at_epoch_ends_and_at_the_end_once(tmp_path: Path) -> None:
    session = CountingSession()
    _, told, beats = run(tmp_path, session, validation=range(3), steps=7, validate_every=2)
    assert told.validations == [2, 3, 4, 6, 7]
    assert session.evaluations[0] == (2, NUM_SAMPLES)  # every sample, from the start of the epoch, each time
    assert {samples for _, samples in session.evaluations} == {NUM_SAMPLES}
    assert (2, Phase.VALIDATION) in beats


def test_without_validation_data_nothing_is_validated(tmp_path: Path) -> None:
    _, told, _ = run(tmp_path, CountingSession(), steps=3)
    assert told.validations == []
    failing = TargetError("data() of job.py raised", found="KeyError: 'validation'")
    _, told, _ = run(tmp_path / "b", CountingSession(), validation=failing, steps=3)
    assert told.validations == []
    assert "KeyError" in told.messages[0]
    with pytest.raises(TargetError, match="raised"):
        run(tmp_path / "c", CountingSession(), validation=failing, steps=3, validate_every=1)


def test_a_stop_saves_at_once(tmp_path: Path) -> None:
    session = CountingSession(stop_at=2)
    result, told, beats = run(tmp_path, session, validation=range(3), steps=7)
    assert (result.step, result.stopped) == (2, True)
    assert session.saves == [2]
    assert told.validations == []
    assert beats[-1] == (2, Phase.SAVE)


@pytest.mark.parametrize("stop_at", [1, 2, 3, 4])
def test_a_stopped_run_goes_on_with_the_batches_that_are_left(tmp_path: Path, stop_at: int) -> None:
    _, whole, _ = run(tmp_path / "whole", CountingSession(), epochs=2)
    first, told, _ = run(tmp_path, CountingSession(stop_at=stop_at), epochs=2)
    _, rest, _ = run(tmp_path, CountingSession(), epochs=2, resume_from=Path(first.checkpoint))

    def seen(records: list[StepRecord]) -> list[tuple[int, int, float]]:
        return [(record.step, record.samples, record.loss) for record in records]

    assert seen(told.records) + seen(rest.records) == seen(whole.records)
    assert f"resumed after step {stop_at}" in rest.messages[0]


def test_a_finished_run_says_that_nothing_is_left(tmp_path: Path) -> None:
    first, _, _ = run(tmp_path, CountingSession(), steps=3)
    session = CountingSession()
    result, told, _ = run(tmp_path, session, steps=3, resume_from=Path(first.checkpoint))
    assert session.saves == []
    assert told.records == []
    assert "nothing left to do" in told.messages[-1]
    assert (result.step, result.checkpoint) == (3, first.checkpoint)
    assert math.isnan(result.loss)


def test_a_one_batch_job_cannot_be_trained(tmp_path: Path) -> None:
    job = Job(target="job.py", run_dir=str(tmp_path))
    one_batch = dataclasses.replace(parts(), data=None)
    with pytest.raises(TargetError, match="brings one batch"):
        train_rank(one_batch, job, CANDIDATE, CountingSession(), [], beat=lambda step, phase: None)


def test_rates_follow_from_the_estimate() -> None:
    rates = Rates.of(parts(), Job(target="job.py", batch_size=4), CANDIDATE, 2)
    session = CountingSession()
    session.loader(None, batch_size=4)
    record = rates.record(session.step(4), seconds=1.0)
    # Twice the predicted 0.5 s: half the predicted 2 TFLOP/s per device and half its mfu of 0.25.
    assert record.tflops == pytest.approx(1.0)
    assert record.mfu == pytest.approx(0.125)
    assert record.tokens_per_second == 32.0
    half = rates.record(session.step(2), seconds=1.0)
    assert half.mfu == pytest.approx(record.mfu / 2)


# ---- the run directory


def claim(
    path: Path, *, resume: bool = True, fingerprint: str = "f", **options: Any
) -> tuple[bool, tuple[str, ...]]:
    job = Job(**{"target": "job.py", "run_dir": str(path), **options})
    plan = Plan(
        model=ModelSummary(name="m", parameters=1, components=1),
        cluster=ClusterSummary(devices=1, nodes=1, kind="cpu"),
        best=None,
    )
    claimed = claim_run_dir(job, plan, fingerprint=fingerprint, resume=resume)
    return claimed.resumes, claimed.changed


def test_a_new_run_directory_gets_job_and_plan(tmp_path: Path) -> None:
    assert claim(tmp_path / "a") == (False, ())
    assert from_json_text(Job, (tmp_path / "a" / "job.json").read_text()).fingerprint == "f"
    assert (tmp_path / "a" / "plan.json").exists()
    assert claim(tmp_path / "a", devices="local:4", steps=9) == (True, ())


@pytest.mark.parametrize(
    ("options", "fingerprint", "found"),
    [
        ({"target": "other.py"}, "g", "its target is job.py, not other.py"),
        ({"overrides": {"width": "8"}}, "g", "its --set is {}, not {'width': '8'}"),
        ({"seq_len": 64}, "f", "its --seq-len is None, not 64"),
    ],
)
def test_another_jobs_directory_is_refused_untouched(
    tmp_path: Path, options: dict[str, Any], fingerprint: str, found: str
) -> None:
    claim(tmp_path)
    before = (tmp_path / "job.json").read_bytes()
    with pytest.raises(OptionError, match="belongs to another job") as caught:
        claim(tmp_path, fingerprint=fingerprint, **options)
    assert caught.value.found == found
    assert "--run-dir" in caught.value.try_
    assert "--resume off" in caught.value.try_
    assert (tmp_path / "job.json").read_bytes() == before


def test_the_same_file_by_another_path_is_the_same_job(tmp_path: Path) -> None:
    claim(tmp_path)
    assert claim(tmp_path, target="/abs/job.py") == (True, ())


def test_an_edited_file_is_told(tmp_path: Path) -> None:
    claim(tmp_path)
    assert claim(tmp_path, fingerprint="g") == (True, ("job.py has changed since this run began",))


def test_without_resume_the_run_that_is_there_is_set_aside(tmp_path: Path) -> None:
    for run_number in range(3):
        claim(tmp_path, resume=False, seed=run_number)
        (tmp_path / "metrics.jsonl").write_text(f"run {run_number}\n")
        (tmp_path / "logs").mkdir(exist_ok=True)
    assert (tmp_path / "previous-1" / "metrics.jsonl").read_text() == "run 0\n"
    assert (tmp_path / "previous-2" / "metrics.jsonl").read_text() == "run 1\n"
    assert (tmp_path / "metrics.jsonl").read_text() == "run 2\n"
    assert not (tmp_path / "previous-2" / "previous-1").exists()
    assert (tmp_path / "logs").exists()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="cannot write to the run directory"):
        claim(tmp_path / "file" / "run")
