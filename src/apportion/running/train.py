"""The training loop of one rank: steps, validation, checkpoints, resume and stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from ..errors import TargetError
from ..reading import JobParts
from ..records import Candidate, Job, Parity, Phase, StepRecord, TrainResult

CHECKPOINTS = "checkpoints"
Beat = Callable[[int, Phase], None]


class StepLike(Protocol):
    """What a session tells of one step, the same on every rank (`running.session.StepResult`)."""

    @property
    def step(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def samples(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def epoch(self) -> int: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def stop(self) -> bool: ...


class Trainable(Protocol):
    """What the loop needs of a session (`running.session.Session`); `num_steps` counts those done."""

    @property
    def world_size(self) -> int: ...
    @property
    def num_steps(self) -> int: ...
    @property
    def parity(self) -> Parity | None: ...
    def loader(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        collate: Any = None,
        num_workers: int = 0,
    ) -> Any: ...
    def step(self, batch: Any) -> StepLike: ...
    def evaluate(self, loader: Iterable[Any], metrics: Any = None) -> dict[str, float]: ...
    def save(self, root: Path) -> Path: ...
    def load(self, root: Path) -> None: ...


class Observer(Protocol):
    """Told of what happens, in order; on rank 0 for what is shown and written."""

    def on_step(self, record: StepRecord) -> None: ...
    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def on_checkpoint(self, path: Path) -> None: ...
    def on_message(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What turns a step's samples and seconds into rates.

    Units: FLOPs of the model per sample (no recompute) and the dense peak of one device in FLOP/s, both 0
    where the candidate's estimate does not know them.
    """

    tokens_per_sample: int
    flops_per_sample: float
    peak_flops_per_second: float
    num_devices: int

    @classmethod
    def of(cls, parts: JobParts, job: Job, candidate: Candidate, world_size: int) -> Rates:
        """Read the rates out of the candidate's estimate, which was made for the job's batch size."""
        estimate = candidate.estimate
        per_device = estimate.tflops_per_device * 1e12
        flops = per_device * estimate.step_seconds * candidate.mesh.num_ranks
        return cls(
            tokens_per_sample=parts.tokens_per_sample,
            flops_per_sample=flops / job.batch_size,
            peak_flops_per_second=per_device / estimate.mfu if estimate.mfu else 0.0,
            num_devices=max(world_size, candidate.mesh.num_ranks),
        )

    def record(self, result: StepLike, seconds: float) -> StepRecord:
        """Return the step's line of `metrics.jsonl`; `seconds` from the end of the step before to its end."""
        flops_per_second = self.flops_per_sample * result.samples / seconds / self.num_devices
        peak = self.peak_flops_per_second
        return StepRecord(
            step=result.step,
            epoch=result.epoch,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            samples=result.samples,
            seconds=seconds,
            tokens_per_second=self.tokens_per_sample * result.samples / seconds,
            mfu=flops_per_second / peak if peak else 0.0,
            memory=result.memory_bytes,
            tflops=flops_per_second / 1e12,
        )


def train_rank(
    parts: JobParts,
    job: Job,
    candidate: Candidate,
    session: Trainable,
    observers: Sequence[Observer],
    *,
    beat: Beat,
    resume_from: Path | None = None,
) -> TrainResult:
    """Train until the job's steps or epochs are done, or until the ranks agree to stop; save at the end.

    Collective: every rank of the group calls it. `resume_from` is a checkpoint to go on from, the same on
    every rank. `beat` is told where the rank is. A stop is no error here: the result says `stopped`.

    Raises: TargetError where the data does not fit; whatever the session raises.
    """
    training = _Training(
        parts, job, session, observers, beat, Rates.of(parts, job, candidate, session.world_size)
    )
    return training.run(resume_from)


@final
class _Training:
    """The loop's state: what was saved and validated last."""

    def __init__(
        self,
        parts: JobParts,
        job: Job,
        session: Trainable,
        observers: Sequence[Observer],
        beat: Beat,
        rates: Rates,
    ) -> None:
        self.parts = parts
        self.job = job
        self.session = session
        self.observers = observers
        self.beat = beat
        self.rates = rates
        self.step = 0
        self.loss = float("nan")
        self.saved_step = 0
        self.checkpoint = ""
        self.validated_step = 0

    def run(self, resume_from: Path | None) -> TrainResult:
        started = time.perf_counter()
        train, validation = self._loaders()
        if resume_from is not None:
            self._resume(resume_from)
            self._tell_if_done(train)
        stopped = self._train(train, validation)
        self._save()
        return TrainResult(
            step=self.step,
            loss=self.loss,
            seconds=time.perf_counter() - started,
            stopped=stopped,
            checkpoint=self.checkpoint,
            parity=self.session.parity,
        )

    def _loaders(self) -> tuple[Any, Any]:
        """Return the loaders of training and validation data; the second is None where there is none."""
        if self.parts.data is None:
            raise TargetError(
                f"{self.parts.target} brings one batch, not a data set",
                try_="define data(split) to train; inspect, plan, verify and compare take it as it is",
            )
        train = self._loader(self.parts.data("train"), shuffle=None)
        try:
            dataset = self.parts.data("validation")
        except TargetError as error:
            if self.job.validate_every:
                raise
            self._message(f"no validation: {error.what} ({error.found})")
            dataset = None
        return train, None if dataset is None else self._loader(dataset, shuffle=False)

    def _loader(self, dataset: Any, *, shuffle: bool | None) -> Any:
        return self.session.loader(
            dataset,
            batch_size=self.job.batch_size,
            shuffle=shuffle,
            collate=self.parts.collate,
            num_workers=self.job.num_workers,
        )

    def _resume(self, checkpoint: Path) -> None:
        self.session.load(checkpoint)
        self.step = self.saved_step = self.session.num_steps
        self.checkpoint = str(checkpoint)
        self._message(f"resumed after step {self.step} from {checkpoint}")

    def _tell_if_done(self, loader: Any) -> None:
        if self._is_done(loader):
            self._message(
                f"nothing left to do: {self.step} steps are done; more with --steps or --epochs, "
                "from the start with --resume off"
            )

    def _train(self, loader: Any, validation: Any) -> bool:
        """Run the steps that are left; return whether they ended because of a request to stop."""
        while not self._is_done(loader):
            for result, seconds in self._epoch(loader):
                self._tell(result, seconds)
                if result.stop:
                    return True
                self._in_between(validation)
                if self._is_done(loader):
                    break
            else:
                self._validate(validation)
        self._validate(validation)
        return False

    def _is_done(self, loader: Any) -> bool:
        if self.job.steps is not None:
            return self.step >= self.job.steps
        return bool(loader.epoch >= self.job.epochs)

    def _epoch(self, loader: Any) -> Iterator[tuple[StepLike, float]]:
        """Yield the steps of what is left of the present epoch and the seconds that each took."""
        self.beat(self.step + 1, Phase.DATA)
        started = time.perf_counter()
        for portion in loader:
            self.beat(self.step + 1, Phase.STEP)
            result = self.session.step(portion)
            self.step, self.loss = result.step, result.loss
            yield result, time.perf_counter() - started
            self.beat(self.step + 1, Phase.DATA)
            started = time.perf_counter()

    def _tell(self, result: StepLike, seconds: float) -> None:
        record = self.rates.record(result, seconds)
        for observer in self.observers:
            observer.on_step(record)

    def _in_between(self, validation: Any) -> None:
        if self.job.validate_every and self.step % self.job.validate_every == 0:
            self._validate(validation)
        if self.job.save_every and self.step % self.job.save_every == 0:
            self._save()

    def _validate(self, loader: Any) -> None:
        if loader is None or self.validated_step == self.step:
            return
        self.validated_step = self.step
        metrics = self.session.evaluate(self._beating(loader), self.parts.metrics)
        for observer in self.observers:
            observer.on_validation(self.step, metrics)

    def _beating(self, loader: Any) -> Iterator[Any]:
        for portion in loader:
            self.beat(self.step, Phase.VALIDATION)
            yield portion

    def _save(self) -> None:
        if self.saved_step == self.step:
            return
        self.beat(self.step, Phase.SAVE)
        path = self.session.save(Path(self.job.run_dir) / CHECKPOINTS)
        self.saved_step, self.checkpoint = self.step, str(path)
        for observer in self.observers:
            observer.on_checkpoint(path)

    def _message(self, text: str) -> None:
        for observer in self.observers:
            observer.on_message(text)
