"""What passes between the launcher and its ranks: the task, their events, and how one failed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .cluster import DeviceType
from .job import Job
from .plan import Candidate, Plan
from .report import Parity


class Command(Enum):
    """What a group of ranks is started for."""

    TRAIN = "train"
    VERIFY = "verify"
    COMPARE = "compare"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The argument of every rank: do `command` for `job` in the layout `candidate`.

    `plan` is what `candidate` was taken from and is saved in the run directory. Rank 0 writes its answer (a
    TrainResult, a Parity or a Measured) to the file `result`. `steps` counts those of `verify` and `compare`.
    `device_type` None lets every host use its GPUs where it has enough for its ranks.
    """

    command: Command
    job: Job
    candidate: Candidate
    plan: Plan | None = None
    result: str = ""
    steps: int = 0
    device_type: DeviceType | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How training ended: after which step, and whether because somebody asked it to stop.

    Units: `seconds` are those of this launch, start-up not counted. `loss` is that of the last step.
    """

    step: int
    loss: float
    seconds: float
    stopped: bool = False
    checkpoint: str = ""
    report: str = ""
    parity: Parity | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A candidate as it ran: the median step after the warm-up, the fullest rank's peak, the last loss.

    Units: seconds and bytes. On CPU the peak is the growth of the process's resident memory since just
    before the model was built.
    """

    name: str
    step_seconds: float
    peak_bytes: int
    loss: float
    steps: int


class Phase(Enum):
    """Where a rank is, in the order of one step."""

    START = "start"
    DATA = "data"
    STEP = "step"
    VALIDATION = "validation"
    SAVE = "save"
    END = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A line of `events/rank-N.jsonl`: the rank is now in `phase` of `step`.

    Units: `time` in seconds since the epoch. `pid` and `attempt` tell restarted ranks apart; `ok` is False on
    the END of a rank that failed.
    """

    time: float
    rank: int
    pid: int
    step: int
    phase: Phase
    attempt: int = 0
    ok: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a rank ended: its exception, and whether that only says that another rank went away (`peer`).

    Units: `time` in seconds since the epoch. `kind` is the exception's class; `what`, `found` and `try_` are
    the three lines of an ApportionError; `traceback` is "" for those.
    """

    rank: int
    host: str
    time: float
    kind: str
    what: str
    found: str = ""
    try_: str = ""
    traceback: str = ""
    peer: bool = False
