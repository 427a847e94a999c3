"""A training session on this rank: what `apportion.parallelize` returns and `apportion train` drives."""

from __future__ import annotations

import math
import resource
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..applying import Applied
from ..errors import ParityError, TargetError
from ..profiling.findings import Findings
from ..records import Candidate, Parity, Precision, Traits
from .data import Loader, LoaderSettings, LoaderState, Portion, collate_depends_on_batch
from .engine import Engine, Passed, Place
from .evaluating import evaluate
from .norms import clip_factor, global_norm, scale_gradients
from .portions import Share, share_of_batch, share_of_portion
from .saving import export_session, load_session, save_session
from .scaling import LossScale
from .stats import GlobalStats, StepStats, exchange_stats


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """One optimizer step, the same on every rank.

    Units: `step` counts from 1; `loss` is that of the global batch; `grad_norm` the global norm before
    clipping; `samples` of all ranks; `memory_bytes` this rank's peak so far. `stop`: some rank asked to stop.
    """

    step: int
    loss: float
    grad_norm: float
    samples: int
    lr: float
    epoch: int
    memory_bytes: int
    stop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """What does not change during a session."""

    seed: int = 0
    clip_norm: float | None = None
    batch_size: int | None = None
    fingerprint: str = ""
    keep_checkpoints: int = 2


class Session:
    """Steps a model over global batches such that the answer is that of one device."""

    def __init__(
        self,
        applied: Applied,
        findings: Findings,
        place: Place,
        *,
        settings: SessionSettings,
        schedule: Any = None,
    ) -> None:
        self.applied, self.findings, self.place = applied, findings, place
        self.settings, self.schedule = settings, schedule
        self.engine = Engine(applied, findings, place, seed=settings.seed)
        self.parity: Parity | None = None
        self.num_steps = 0
        self.scale = LossScale() if applied.candidate.precision is Precision.FP16 else None
        self.train_loader: Loader | None = None
        self.resumed_loader: LoaderState | None = None
        self.watch: Callable[[float], None] | None = None
        self._wants_stop = False

    # ---- what it is

    @property
    def model(self) -> nn.Module:
        """The user's own module."""
        return self.applied.model

    @property
    def optimizer(self) -> Optimizer:
        """The user's own optimizer, its groups holding this plan's parameters."""
        return self.applied.optimizer

    @property
    def candidate(self) -> Candidate:
        return self.applied.candidate

    @property
    def traits(self) -> Traits:
        return self.findings.traits

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world_size(self) -> int:
        return self.place.num_ranks

    # ---- data

    def loader(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        shuffle: bool | None = None,
        collate: Any = None,
        num_workers: int = 0,
    ) -> Loader:
        """Return this rank's loader of global batches; `batch_size` counts the samples of all ranks.

        The first loader is the training one, whose position is saved and resumed.
        """
        size = batch_size or self.settings.batch_size or self.candidate.micro_batch_size * self.world_size
        whole = hasattr(dataset, "__getitem__") and self._collates_whole(dataset, collate, size)
        settings = LoaderSettings(
            batch_size=size,
            micro_batch_size=-(-size // (self.world_size * self.candidate.grad_accumulation)),
            rank=self.rank,
            num_ranks=self.world_size,
            shuffle=shuffle,
            seed=self.settings.seed,
            num_workers=num_workers,
            whole=whole,
            pin_memory=self.place.device.type == "cuda",
        )
        loader = Loader(dataset, settings, collate=collate)
        if self.train_loader is None:
            self.train_loader = loader
            if self.resumed_loader is not None:
                loader.load_state_dict(self.resumed_loader)
        return loader

    def _collates_whole(self, dataset: Any, collate: Any, size: int) -> bool:
        if collate is None or self.world_size * self.candidate.grad_accumulation == 1:
            return False
        return collate_depends_on_batch(dataset, collate, min(size, len(dataset)))

    def _share(self, batch: Any) -> Share:
        if isinstance(batch, Portion):
            return share_of_portion(batch, self.place.device)
        return share_of_batch(
            batch,
            self.findings.dims,
            rank=self.rank,
            num_ranks=self.world_size,
            num_micro_batches=self.candidate.grad_accumulation,
            device=self.place.device,
        )

    # ---- steps

    def step(self, batch: Any) -> StepResult:
        """Do one optimizer step over a global batch: a loader's portion, or a batch equal on all ranks.

        Collective. Raises: TargetError for a loss or gradient that is not finite (nothing is stepped then),
        ParityError where ranks turn out to have done different things.
        """
        share = self._share(batch)
        passed = self.engine.run(share, self.num_steps, scale=self.scale.value if self.scale else 1.0)
        stats = self._agree(share, passed)
        norm = self._step_optimizer(passed, stats)
        self.num_steps += 1
        lr = float(self.optimizer.param_groups[0]["lr"]) if "lr" in self.optimizer.param_groups[0] else 0.0
        if self.schedule is not None:
            self.schedule.step()
        return StepResult(
            step=self.num_steps,
            loss=stats.loss,
            grad_norm=norm,
            samples=stats.samples,
            lr=lr,
            epoch=share.epoch,
            memory_bytes=self.memory_bytes(),
            stop=stats.stop,
        )

    def _agree(self, share: Share, passed: Passed) -> GlobalStats:
        self._check_gradients()
        stats = exchange_stats(
            StepStats(
                value=passed.value,
                samples=passed.samples,
                stop=self._wants_stop,
                checksum=share.checksum,
                presence=self._presence(),
                buffers=self.engine.keeper.checksum(),
            ),
            self.place,
        )
        if stats.samples != share.total:
            raise ParityError(
                f"a micro-batch was skipped in step {self.num_steps + 1}",
                found=f"{stats.samples} of {share.total} samples were run",
                try_="this is a bug of the plan's execution; please report it",
            )
        return stats

    def _presence(self) -> int:
        bits = "".join("01"[p.grad is not None] for p in self.model.parameters())
        return zlib.crc32(bits.encode()) & 0xFFFFF

    def _check_gradients(self) -> None:
        if not self.applied.all_used:
            return
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                raise ParityError(
                    f"parameter '{name}' got no gradient on rank {self.rank} in step {self.num_steps + 1}",
                    found="the example batch used it: the model's control flow depends on the data",
                    try_="give an example batch that shows it, so that unused parameters are expected",
                )

    def _step_optimizer(self, passed: Passed, stats: GlobalStats) -> float:
        """Clip and step unless something is not finite; return the norm before clipping."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        scale = self.scale.value if self.scale else 1.0
        unscale = passed.correction / scale
        norm = float(global_norm(gradients, self.place.device)) * unscale
        if self.watch is not None:
            self.watch(unscale)
        if not math.isfinite(stats.loss) and self.scale is None:
            self._refuse_nonfinite("loss", stats.loss)
        if self.scale is None and not math.isfinite(norm):
            self._refuse_nonfinite("gradient norm", norm)
        if self.scale is None or self.scale.accept(norm):
            clip = 1.0 if self.settings.clip_norm is None else clip_factor(norm, self.settings.clip_norm)
            scale_gradients(gradients, unscale * clip)
            self.applied.step_optimizer()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _refuse_nonfinite(self, what: str, value: float) -> None:
        raise TargetError(
            f"the {what} of step {self.num_steps + 1} is {value}",
            found="the weights are still those of the step before",
            try_="a lower learning rate, --clip-norm 1.0, or look at the batch of this step",
        )

    def evaluate(self, loader: Iterable[Any], metrics: Any = None) -> dict[str, float]:
        """Return mean loss and metrics over every sample of `loader` once, without gradients; collective."""
        return evaluate(self.engine, (self._share(batch) for batch in loader), metrics)

    # ---- saving and stopping

    def save(self, root: str | Path) -> Path:
        """Write `root/step-N` (weights, optimizer, schedule, data position, buffers); collective."""
        return save_session(self, Path(root))

    def load(self, root: str | Path) -> None:
        """Go on from a checkpoint (`root/step-N`, or the latest under `root`), of any plan; collective."""
        load_session(self, Path(root))

    def export(self, path: str | Path) -> None:
        """Write the full model as safetensors under the original names; collective."""
        export_session(self, Path(path))

    def request_stop(self) -> None:
        """Ask all ranks to stop after the present step; StepResult.stop says that they agreed."""
        self._wants_stop = True

    def memory_bytes(self) -> int:
        """Return this rank's peak memory in bytes: the GPU allocator's, or the process's resident set."""
        if self.place.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.place.device))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def close(self) -> None:
        """Take hooks and replaced forwards off the user's module."""
        self.engine.scope.remove()
        self.applied.remove()
