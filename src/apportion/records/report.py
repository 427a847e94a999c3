"""What happened: one record per step, the parity with one device, and the whole run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .job import Job
from .plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step as rank 0 saw it; a line of `metrics.jsonl`.

    Units: `step` counts from 1; seconds; `memory` is the peak in bytes on the fullest rank; `lr` that of the
    first group. `tokens_per_second` and `mfu` are 0 where the samples have no tokens or the peak is unknown.
    """

    step: int
    epoch: int
    loss: float
    grad_norm: float
    lr: float
    samples: int
    seconds: float
    tokens_per_second: float
    mfu: float
    memory: int
    tflops: float = 0.0


class ParityStatus(Enum):
    """The outcome of a comparison with one device."""

    EQUAL = "equal"
    REFUSED = "refused"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityErrors:
    """Worst relative L2 error per kind of tensor."""

    loss: float = 0.0
    gradients: float = 0.0
    weights: float = 0.0
    buffers: float = 0.0
    optimizer: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """The tensor with the largest error and the rank that held it."""

    name: str = ""
    rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """A run against one device: equal, refused (with the reason) or wrong (with the worst tensor)."""

    status: ParityStatus
    reason: str = ""
    relative_error: ParityErrors = ParityErrors()
    worst: Worst = Worst()
    tolerance: float = 1e-5
    strategy: str = ""
    world_size: int = 1
    steps: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One run: the plan, every step, validation results, the first-step check and what went wrong."""

    name: str
    plan: Plan
    world_size: int
    steps: tuple[StepRecord, ...]
    validation: tuple[tuple[int, str, float], ...] = ()
    parity: Parity | None = None
    measured_step_seconds: float = 0.0
    measured_peak_bytes: int = 0
    outcome: str = "done"
    notes: tuple[str, ...] = ()
    job: Job | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareRow:
    """One strategy, predicted beside measured.

    Units: seconds per step (the median), bytes on the fullest rank; `loss` after the last step. What was not
    measured is 0 (nan for the loss), and `reason` then says why: the strategy was refused, or its run failed.
    """

    strategy: str
    predicted_step_seconds: float = 0.0
    predicted_peak_bytes: int = 0
    measured_step_seconds: float = 0.0
    measured_peak_bytes: int = 0
    loss: float = float("nan")
    reason: str = ""

    @property
    def ratio(self) -> float:
        """Measured over predicted step time; 0 where either is missing."""
        if not self.predicted_step_seconds:
            return 0.0
        return self.measured_step_seconds / self.predicted_step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Every strategy run in turn. `pick` is the plan's choice, `best` the fastest measured ("" if none ran).

    `regret` is how much longer a step of the pick took than one of the best: 0.03 is 3 % longer; it is nan
    when the pick was not measured.
    """

    rows: tuple[CompareRow, ...]
    pick: str
    best: str = ""
    regret: float = 0.0


class CheckStatus(Enum):
    """The outcome of one check of the machine."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCheck:
    """One check of the machine: what was found and, unless it is ok, the fix."""

    name: str
    status: CheckStatus
    found: str
    fix: str = ""
