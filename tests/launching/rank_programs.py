"""What the ranks of the launching tests do: `python -m rank_programs TASK.json` with {"work": NAME, …}."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from apportion.errors import OptionError, RefusedError
from apportion.rank_frame import RankContext, as_rank
from apportion.records import DeviceType, Phase
from apportion.running.group import process_group

SECONDS_OF_A_STEP = 0.02


def add_up(rank: RankContext, task: dict[str, Any]) -> None:
    """Every rank gives its number plus one; each writes down the sum that it got."""
    sys.stdout.write(f"rank {rank.member.rank} on stdout\n")
    sys.stderr.write(f"rank {rank.member.rank} on stderr\n")
    Path(task["folder"], f"sum-{rank.member.rank}").write_text(str(_sum(rank.member.rank + 1)))


def raise_on_one(rank: RankContext, task: dict[str, Any]) -> None:
    """Rank 1 raises while the others wait for it in a collective."""
    _sum(1)
    if rank.member.rank == 1:
        raise ZeroDivisionError("rank 1 divided by zero")
    _sum(1)


def raise_on_zero(rank: RankContext, task: dict[str, Any]) -> None:
    if rank.member.rank == 0:
        sys.stderr.write("last words\n")
        raise ValueError("rank 0 broke")
    _sum(1)


def refuse(rank: RankContext, task: dict[str, Any]) -> None:
    raise RefusedError("cannot split it", found="an odd number", try_="an even one")


def kill_itself(rank: RankContext, task: dict[str, Any]) -> None:
    """Rank 1 is killed in step 3 while the others wait for it."""
    for step in range(1, 4):
        rank.heartbeat.beat(step, Phase.STEP)
        time.sleep(0.5)  # so that the place is written down
        _sum(1)
    if rank.member.rank == 1:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    _sum(1)


def leave(rank: RankContext, task: dict[str, Any]) -> None:
    """Rank 1 leaves without a word."""
    if rank.member.rank == 1:
        sys.stderr.write("about to leave\n")
        sys.stderr.flush()
        os._exit(7)
    _sum(1)


def be_stubborn(rank: RankContext, task: dict[str, Any]) -> None:
    """Rank 1 raises; the others take no notice of anything."""
    if rank.member.rank == 1:
        time.sleep(0.5)
        raise ValueError("the first to fail")
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(0.1)


def step_until_stopped(rank: RankContext, task: dict[str, Any]) -> None:
    """Take steps until some rank was asked to stop, agree on that, and write down the last one."""
    for step in range(1, 5000):
        rank.heartbeat.beat(step, Phase.STEP)
        time.sleep(SECONDS_OF_A_STEP)
        Path(task["folder"], "stepping").touch()
        if _sum(int(rank.signals.stop_requested)):
            Path(task["folder"], f"stopped-{rank.member.rank}").write_text(str(step))
            return


def stand_still(rank: RankContext, task: dict[str, Any]) -> None:
    """Rank 1 loads data for ever; the others wait for it in a collective."""
    rank.heartbeat.beat(1, Phase.DATA)
    Path(task["folder"], "stepping").touch()
    while rank.member.rank == 1:
        time.sleep(0.1)
    rank.heartbeat.beat(1, Phase.STEP)
    _sum(1)


def fail_once(rank: RankContext, task: dict[str, Any]) -> None:
    """Rank 1 fails in the first attempt."""
    if rank.member.rank == 1 and rank.heartbeat.attempt == 0:
        raise ValueError("only once")
    add_up(rank, task)


def _sum(number: int) -> int:
    values = torch.tensor([number])
    dist.all_reduce(values)
    return int(values)


WORKS: dict[str, Callable[[RankContext, dict[str, Any]], None]] = {
    work.__name__: work
    for work in (
        add_up,
        raise_on_one,
        raise_on_zero,
        refuse,
        kill_itself,
        leave,
        be_stubborn,
        step_until_stopped,
        stand_still,
        fail_once,
    )
}


def _work(rank: RankContext) -> None:
    task = json.loads(Path(sys.argv[1]).read_text())
    member = rank.member
    with process_group(
        rank=member.rank,
        local_rank=member.local_rank,
        world_size=member.world_size,
        device_type=DeviceType.CPU,
        timeout_seconds=rank.timeout_seconds,
    ):
        if task["work"] not in WORKS:
            raise OptionError(f"no work called {task['work']}")
        WORKS[task["work"]](rank, task)


if __name__ == "__main__":
    sys.exit(as_rank(os.environ, _work))
