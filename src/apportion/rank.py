"""The program of one rank: `python -m apportion.rank TASK.json`, started by a launcher.

It reads the task and the target, meets the other ranks, does the command, and leaves its answer (rank 0) and
its end (every rank) where the launcher finds them. `run_joined` does the same inside a process that somebody
else's launcher has started.
"""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import sys
from collections.abc import Callable, Sized
from contextlib import ExitStack
from pathlib import Path

from .errors import ApportionError, RankError
from .launching.joined import JoinedGroup
from .rank_frame import RankContext, as_rank, timeout_seconds
from .reading import JobParts, read_target
from .records import (
    Command,
    DeviceType,
    Job,
    Measured,
    Parity,
    Task,
    TrainResult,
    from_json_text,
    to_json_text,
)
from .reporting.html import write_report
from .reporting.metrics import MetricsWriter, read_metrics
from .reporting.observer import Observer
from .reporting.progress import Progress
from .running.checkpoint import latest_checkpoint, read_meta
from .running.group import is_peer_failure, pick_device_type, process_group
from .running.heartbeat import Heartbeat
from .running.measure import measure_rank, resident_bytes
from .running.opening import open_session
from .running.run_dir import claim_run_dir, write_atomically
from .running.signals import ENDED_ON_SIGTERM, SignalWatch
from .running.together import on_first_rank
from .running.train import CHECKPOINTS, train_rank
from .running.verify import verify_rank

Answer = TrainResult | Parity | Measured


def main(arguments: list[str]) -> int:
    """Do the task named on the command line; return the exit code."""
    return as_rank(os.environ, lambda rank: _do_task_file(Path(arguments[0]), rank))


def run_joined(
    member: JoinedGroup, prepare: Callable[[], Task], *, device_type: DeviceType | None = None
) -> Answer:
    """Do, in this process of a group that is already there, the task that `prepare` gives on rank 0.

    Collective: every process of the group calls it; `prepare` runs on rank 0 only and the others get its task,
    or its error. Signals ask for a stop while it runs (main thread only).

    Raises: whatever the rank raises; where that only says that another rank is gone, a RankError.
    """
    os.environ.update(member.env())
    heartbeat = Heartbeat(None, rank=member.rank)
    with SignalWatch(heartbeat, launcher_pid=None) as signals:
        context = RankContext(
            member=member,
            heartbeat=heartbeat,
            signals=signals,
            timeout_seconds=timeout_seconds(os.environ),
        )
        try:
            return _in_group(context, lambda: on_first_rank(prepare), device_type)
        except Exception as error:
            if isinstance(error, ApportionError) or not is_peer_failure(error):
                raise
            raise RankError(
                f"rank {member.rank} on {socket.gethostname()} lost the connection to another rank",
                found=str(error).split("\n", 1)[0],
                try_="read the output of the rank that failed first",
            ) from error


def _do_task_file(path: Path, rank: RankContext) -> None:
    task = from_json_text(Task, path.read_text())
    answer = _in_group(rank, lambda: task, task.device_type)
    if rank.member.rank == 0 and task.result:
        write_atomically(Path(task.result), to_json_text(answer))


def _in_group(rank: RankContext, get_task: Callable[[], Task], device_type: DeviceType | None) -> Answer:
    member = rank.member
    with process_group(
        rank=member.rank,
        local_rank=member.local_rank,
        world_size=member.world_size,
        device_type=pick_device_type(member.local_world_size, device_type),
        timeout_seconds=rank.timeout_seconds,
    ):
        return do_task(get_task(), rank)


def do_task(task: Task, rank: RankContext) -> Answer:
    """Do a task inside the process group and return rank 0's answer (the same everywhere)."""
    job = task.job
    parts = read_target(job.target, overrides=job.overrides, seq_len=job.seq_len, seed=job.seed)
    if task.command is Command.TRAIN:
        return _train(parts, task, rank)
    rank.signals.on_stop(lambda: os._exit(ENDED_ON_SIGTERM))  # there is nothing to save
    if task.command is Command.VERIFY:
        return verify_rank(parts, job, task.candidate, task.steps)
    return _measure(parts, task, rank)


def _measure(parts: JobParts, task: Task, rank: RankContext) -> Measured:
    job = dataclasses.replace(task.job, check_first_step=False)
    baseline_bytes = resident_bytes()
    session = open_session(parts, job, task.candidate)
    try:
        return measure_rank(
            parts,
            job,
            session,
            name=task.candidate.name,
            steps=task.steps,
            beat=rank.heartbeat.beat,
            baseline_bytes=baseline_bytes,
        )
    finally:
        session.close()


def _train(parts: JobParts, task: Task, rank: RankContext) -> TrainResult:
    job, run_dir = task.job, Path(task.job.run_dir)
    first = rank.member.rank == 0
    resume = job.resume or rank.heartbeat.attempt > 0
    plan = None if task.plan is None else dataclasses.replace(task.plan, best=task.candidate)
    claimed = on_first_rank(lambda: claim_run_dir(job, plan, fingerprint=parts.fingerprint, resume=resume))
    rank.heartbeat.open(run_dir / "events" / f"rank-{rank.member.rank}.jsonl")
    checkpoint = on_first_rank(lambda: latest_checkpoint(run_dir / CHECKPOINTS))
    session = open_session(parts, job, task.candidate)
    rank.signals.on_stop(session.request_stop)
    with ExitStack() as stack:
        stack.callback(session.close)
        observers = _observers(parts, task, checkpoint) if first else []
        for observer in observers:
            stack.callback(observer.close)
            for text in claimed.changed:
                observer.on_message(text)
        result = train_rank(
            parts, job, task.candidate, session, observers, beat=rank.heartbeat.beat, resume_from=checkpoint
        )
    if not first:
        return result
    if math.isnan(result.loss):  # nothing was left to do
        result = dataclasses.replace(result, loss=read_metrics(run_dir)[-1].loss)
    if result.parity is not None:
        write_atomically(run_dir / "parity.json", to_json_text(result.parity))
    return result if plan is None else dataclasses.replace(result, report=str(write_report(run_dir)))


def _observers(parts: JobParts, task: Task, checkpoint: Path | None) -> list[Observer]:
    """Return who is told on rank 0: the files of the run directory, and the log lines on stderr."""
    job = task.job
    start_step = 0 if checkpoint is None else read_meta(checkpoint).step
    progress = Progress(
        _total_steps(parts, job),
        log_every=job.log_every,
        device_bytes=0 if task.plan is None else task.plan.cluster.device_memory_bytes,
        start_step=start_step,
    )
    return [MetricsWriter(Path(job.run_dir), resume_step=start_step), progress]


def _total_steps(parts: JobParts, job: Job) -> int:
    """Return the steps of the whole run, 0 where a stream does not tell."""
    if job.steps is not None:
        return job.steps
    data = None if parts.data is None else parts.data("train")
    return -(-len(data) // job.batch_size) * job.epochs if isinstance(data, Sized) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
