"""From the failures of several ranks to the one error that is shown: that of the rank that failed first.

Note [who failed first]
When a rank raises, dies or leaves, the others lose their connection to it and raise too, some of them before
the launcher has seen the first one. So failures are ranked by what they say, and by time only among equals:
an exception of the rank itself, then a death by a signal that we did not send, then an exit without a word,
then an exception that only says that another rank went away, then what we ended ourselves.
"""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import (
    ApportionError,
    OptionError,
    ParityError,
    PlanError,
    RankError,
    RefusedError,
    StoppedError,
    TargetError,
)
from ..records import Failure, from_json, to_json

CLASSES: Mapping[str, type[ApportionError]] = {
    cls.__name__: cls
    for cls in (TargetError, OptionError, PlanError, RefusedError, ParityError, RankError, StoppedError)
}
# What the launcher and its agent send to end ranks, and what a rank returns that ended itself for them.
OUR_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR1})
ENDED_ON_SIGTERM = 128 + signal.SIGTERM
STDERR_LINES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a rank's process ended. `said` is what it left in its error file, `log` its stderr."""

    rank: int
    exit_code: int
    said: Failure | None
    log: Path
    ended_by_us: bool = False

    @property
    def order(self) -> tuple[int, float]:
        """Smaller is nearer to the cause; see Note [who failed first]."""
        if self.said is not None:
            return (3 if self.said.peer else 0), self.said.time
        if self.ended_by_us or -self.exit_code in OUR_SIGNALS or self.exit_code == ENDED_ON_SIGTERM:
            return 4, 0.0
        return (1 if self.exit_code < 0 else 2), 0.0


def first_ended(ended: Iterable[Ended]) -> Ended:
    """Return the process whose end explains the others'."""
    return min(ended, key=lambda one: (one.order, one.rank))


def error_of(ended: Ended, *, place: str = "") -> ApportionError:
    """Return the error to raise for a rank that ended so; `place` says where it was ("in step 12").

    An ApportionError of the rank comes back as itself; anything else is a RankError. The traceback, where
    there is one, is a note of the error (`__notes__`).
    """
    if ended.said is not None:
        return _raised(ended.said, ended.log)
    if ended.exit_code < 0:
        return _killed(ended, place)
    return RankError(
        f"rank {ended.rank} on {socket.gethostname()} ended with exit code {ended.exit_code} without an error",
        found=_last_lines(ended.log) or f"nothing in {ended.log}",
        try_=f"read {ended.log}; a call of os._exit or a crash inside a library leaves no traceback",
    )


def _raised(failure: Failure, log: Path) -> ApportionError:
    if failure.kind in CLASSES:
        return CLASSES[failure.kind](failure.what, found=failure.found, try_=failure.try_)
    if failure.peer:
        error = RankError(
            f"rank {failure.rank} on {failure.host} lost the connection to another rank",
            found=f"{failure.kind}: {_first_line(failure.what)}; no rank said why it went away",
            try_=f"read the logs of the other ranks, beside {log.parent}; on several hosts check the network",
        )
    else:
        error = RankError(
            f"rank {failure.rank} on {failure.host} failed: {failure.kind}: {_first_line(failure.what)}",
            found=f"raised {_where(failure.traceback)}",
            try_=f"mend that; the output of the rank is in {log.parent}",
        )
    if failure.traceback:
        error.add_note(failure.traceback)
    return error


def _killed(ended: Ended, place: str) -> RankError:
    number = -ended.exit_code
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    advice = {
        signal.SIGKILL: "if the machine ran out of memory (`dmesg` says so), use a smaller --micro-batch-size, "
        "fewer processes or a strategy that shards; else somebody killed it: run again to resume",
        signal.SIGSEGV: f"a library crashed; read {ended.log}",
        signal.SIGABRT: f"a library gave up; read {ended.log}",
    }
    return RankError(
        f"rank {ended.rank} on {socket.gethostname()} was killed by signal {number} ({name})",
        found=f"it was {place}" if place else _last_lines(ended.log) or "it left no message",
        try_=advice.get(signal.Signals(number), f"read {ended.log}") if name != "unknown" else "run again",
    )


def _first_line(text: str) -> str:
    return text.strip().split("\n", 1)[0]


def _where(traceback: str) -> str:
    frames = [line.strip() for line in traceback.split("\n") if line.lstrip().startswith('File "')]
    return f"at {frames[-1]}" if frames else "outside Python code"


def _last_lines(log: Path) -> str:
    if not log.is_file():
        return ""
    lines = [line for line in log.read_text(errors="replace").split("\n") if line.strip()]
    return "\n         ".join(lines[-STDERR_LINES:])


def error_file_text(failure: Failure) -> str:
    """Return the content of an error file: what PyTorch's launcher reads, and the whole failure beside it."""
    message = {
        "message": f"{failure.kind}: {failure.what}",
        "extraInfo": {
            "py_callstack": failure.traceback or f"{failure.kind}: {failure.what}",
            "timestamp": str(int(failure.time)),
        },
    }
    return json.dumps({"message": message, "failure": to_json(failure)})


def failure_in(data: Mapping[str, Any]) -> Failure | None:
    """Return the failure in the data of an error file, or None if it is not one of ours."""
    return from_json(Failure, data["failure"]) if "failure" in data else None
