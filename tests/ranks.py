"""Run a function on several gloo processes of this machine, for the tests.

    results = run_ranks(work, 2, "argument")          # work(rank, "argument") on ranks 0 and 1

    with RankPool(4) as pool:                         # the same processes for a whole table of cases
        for case in CASES:
            pool.run(work, case)

`work` must be a module-level function; its arguments and results must pickle. The default process group is
up while it runs. Warnings are errors there too. The first rank that fails is reported with its traceback and
the others are stopped.
"""

from __future__ import annotations

import datetime
import functools
import math
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

# How long other ranks may take to report after the first failure, so that the earliest cause is shown.
GRACE_SECONDS = 0.5


class RankFailed(AssertionError):  # noqa: N818 - a failed test, not an error of the package
    """A rank raised, died or did not answer in time; the message holds its traceback."""


class Answer(NamedTuple):
    """What a rank sends back: `time` is the machine-wide monotonic clock, in seconds."""

    ok: bool
    time: float
    value: Any


def run_ranks(fn: Callable[..., Any], world_size: int, *args: object, timeout_s: float = 120.0) -> list[Any]:
    """Return `fn(rank, *args)` of every rank, in the order of the ranks.

    Raises: RankFailed with the traceback of the rank that failed first.
    """
    with RankPool(world_size, timeout_s=timeout_s) as pool:
        return pool.run(fn, *args)


class RankPool:
    """`world_size` gloo processes that stay up between calls, started on the first and anew after a failure."""

    def __init__(self, world_size: int, *, timeout_s: float = 120.0) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._store: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: object) -> list[Any]:
        """Return `fn(rank, *args)` of every rank, in the order of the ranks."""
        if not self._ranks:
            self._start()
        message = pickle.dumps((fn, args))
        for _, connection in self._ranks:
            connection.send_bytes(message)
        try:
            return self._collect()
        except BaseException:
            self._stop(at_once=True)
            raise

    def close(self) -> None:
        """End the processes."""
        self._stop(at_once=False)

    def _start(self) -> None:
        self._store = tempfile.TemporaryDirectory(prefix="ranks-")
        store = os.path.join(self._store.name, "store")
        context = _context()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            setup = (rank, self.world_size, store, self.timeout_s, theirs, dict(os.environ))
            process = context.Process(target=_rank_main, args=setup, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _collect(self) -> list[Any]:
        deadline = time.monotonic() + self.timeout_s
        answers: dict[int, Answer] = {}
        while len(answers) < self.world_size:
            failed = any(not answer.ok for answer in answers.values())
            pending = {
                connection: rank for rank, (_, connection) in enumerate(self._ranks) if rank not in answers
            }
            left = GRACE_SECONDS if failed else deadline - time.monotonic()
            ready = wait(list(pending), timeout=max(left, 0.0))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending[connection]
                answers[rank] = self._receive(rank, connection)
        return self._judge(answers)

    def _receive(self, rank: int, connection: Connection) -> Answer:
        try:
            answer = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            process = self._ranks[rank][0]
            process.join(5)
            # Others may have told of the lost connection before; a death is the cause all the same.
            return Answer(False, -math.inf, f"died with exit code {process.exitcode}")
        assert isinstance(answer, Answer)
        return answer

    def _judge(self, answers: dict[int, Answer]) -> list[Any]:
        failures = [(answer.time, rank) for rank, answer in answers.items() if not answer.ok]
        if failures:
            _, first = min(failures)
            raise RankFailed(f"rank {first} of {self.world_size} failed first:\n{answers[first].value}")
        silent = [rank for rank in range(self.world_size) if rank not in answers]
        if silent:
            raise RankFailed(f"ranks {silent} of {self.world_size} gave no answer within {self.timeout_s:g} s")
        return [answers[rank].value for rank in range(self.world_size)]

    def _stop(self, *, at_once: bool) -> None:
        for process, connection in self._ranks:
            connection.close()
            if at_once:
                process.kill()
        for process, _ in self._ranks:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self._ranks = []
        if self._store is not None:
            self._store.cleanup()
            self._store = None


@functools.cache
def _context() -> ForkServerContext:
    """Return where processes come from: a server that has imported torch once, in one thread, and forks.

    Importing torch anew costs seconds of processor time in every rank. OMP_NUM_THREADS counts when it is
    imported; the rest of the environment is sent along.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.checkpoint"])
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before
    return context


def _rank_main(
    rank: int, world_size: int, store: str, timeout_s: float, connection: Connection, environ: dict[str, str]
) -> None:
    import torch
    import torch.distributed as dist

    os.environ.clear()
    os.environ.update(environ)
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group(
        "gloo",
        init_method=Path(store).as_uri(),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            break
        connection.send_bytes(_answer(rank, message))
    dist.destroy_process_group()


def _answer(rank: int, message: bytes) -> bytes:
    try:
        fn, args = pickle.loads(message)
        return pickle.dumps(Answer(True, time.monotonic(), fn(rank, *args)))
    except BaseException:  # whatever it is, the test that asked must see it
        sys.stdout.flush()
        return pickle.dumps(Answer(False, time.monotonic(), traceback.format_exc()))
