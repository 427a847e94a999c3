"""The frame of a rank's program: its place, signals and heartbeat, and how the launcher hears of its end."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import ApportionError, OptionError, RankError
from .launching.failures import error_file_text
from .launching.joined import JoinedGroup, joined
from .records import Failure
from .running.group import is_peer_failure
from .running.heartbeat import Heartbeat
from .running.run_dir import write_atomically
from .running.signals import SignalWatch

ALONE = JoinedGroup(
    launcher="none",
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    master_addr="127.0.0.1",
    master_port=0,
)
# As in launching/local.py: the default of torch.distributed for gloo.
STEP_TIMEOUT_SECONDS = 1800.0
# The launcher notices a hang itself and says which rank is behind; the process group's own timeout comes later.
AFTER_LAUNCHER_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """What a rank works with: its place, who is told where it is, and who hears of a stop."""

    member: JoinedGroup
    heartbeat: Heartbeat
    signals: SignalWatch
    timeout_seconds: float


def as_rank(env: Mapping[str, str], work: Callable[[RankContext], None]) -> int:
    """Do `work` as a rank of our launcher: take its signals, tell it where we are and how we ended.

    Whatever `work` raises goes into the error file of the launcher; the exit code is the error's own, and 5
    for errors that are not ours. After an error the process is ended at once: threads and peers that are
    still about must not keep it.
    """
    member = joined(env) or ALONE
    attempt = int(env.get("TORCHELASTIC_RESTART_COUNT", "0"))
    heartbeat = Heartbeat(_events(env, member.rank), rank=member.rank, attempt=attempt)
    launcher = int(env["APPORTION_LAUNCHER_PID"]) if "APPORTION_LAUNCHER_PID" in env else None
    with SignalWatch(heartbeat, launcher_pid=launcher) as signals:
        heartbeat.start()
        context = RankContext(
            member=member,
            heartbeat=heartbeat,
            signals=signals,
            timeout_seconds=timeout_seconds(env) + AFTER_LAUNCHER_SECONDS,
        )
        try:
            work(context)
        except BaseException as error:  # whatever it is, the launcher must hear of it
            _leave_failure(env, member.rank, error)
            heartbeat.end(ok=False)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(error.exit_code if isinstance(error, ApportionError) else RankError.exit_code)
        heartbeat.end(ok=True)
    return 0


def timeout_seconds(env: Mapping[str, str]) -> float:
    """Return the seconds that a rank may take for one step (`APPORTION_STEP_TIMEOUT`).

    Raises: OptionError if that is no number above 0.
    """
    text = env.get("APPORTION_STEP_TIMEOUT", "") or str(STEP_TIMEOUT_SECONDS)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise OptionError(f"APPORTION_STEP_TIMEOUT is '{text}'", try_="seconds, a number above 0")
    return seconds


def _events(env: Mapping[str, str], rank: int) -> Path | None:
    return Path(env["APPORTION_EVENTS"]) / f"rank-{rank}.jsonl" if "APPORTION_EVENTS" in env else None


def _leave_failure(env: Mapping[str, str], rank: int, error: BaseException) -> None:
    """Write what happened into the launcher's error file, or to stderr where there is none."""
    ours = isinstance(error, ApportionError)
    trace = "".join(traceback.format_exception(error))
    failure = Failure(
        rank=rank,
        host=socket.gethostname(),
        time=time.time(),
        kind=type(error).__name__,
        what=error.what if isinstance(error, ApportionError) else str(error),
        found=error.found if isinstance(error, ApportionError) else "",
        try_=error.try_ if isinstance(error, ApportionError) else "",
        traceback="" if ours else trace,
        peer=is_peer_failure(error),
    )
    file = env.get("TORCHELASTIC_ERROR_FILE", "")
    if file:
        write_atomically(Path(file), error_file_text(failure))
    else:
        sys.stderr.write(f"{error}\n" if ours else trace)
