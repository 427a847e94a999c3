"""Signals in a rank: ask the session to stop, and end a rank that cannot.

Note [blocked ranks]
A rank that waits in a collective for a peer that is gone runs no Python, so Python's own signal handlers do not
run either. The signal's number arrives on a file descriptor all the same (`signal.set_wakeup_fd`), where a
thread of ours waits: it asks for the stop, and after a SIGTERM it ends the process if the main thread does not
move within the grace time.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import final

from ..records import Phase
from .heartbeat import Heartbeat

# Others stop within 5 s of a failure; one second is left for noticing and for leaving.
GRACE_SECONDS = 4.0
LOOK_EVERY_SECONDS = 0.25
ENDED_ON_SIGTERM = 128 + signal.SIGTERM


def _take(number: int, frame: FrameType | None) -> None:
    """Take a signal from its default action; the watching thread acts on it."""


@final
class SignalWatch:
    """While entered, SIGTERM and SIGUSR1 ask for a stop (`stop_requested`, and `on_stop` is called once).

    With `launcher_pid` (ranks of our own launcher) SIGINT is ignored, because the launcher decides, and the
    process ends when that launcher is gone; without it SIGINT asks for a stop too. After SIGTERM the process
    ends with code 143 if the main thread does not go on for GRACE_SECONDS, or for twice its longest pause so
    far where steps are long; saving may take its time. SIGUSR2 writes the stacks of all threads to stderr.
    """

    def __init__(self, heartbeat: Heartbeat, *, launcher_pid: int | None) -> None:
        self.heartbeat = heartbeat
        self.launcher_pid = launcher_pid
        self.stop_requested = False
        self._on_stop: Callable[[], None] | None = None
        self._reader, self._writer = socket.socketpair()
        self._closed = False
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._before: dict[int, signal.Handlers | Callable[[int, FrameType | None], object] | int | None] = {}
        self._before_fd = -1

    def on_stop(self, call: Callable[[], None]) -> None:
        """Have `call` called, from another thread, when a stop is asked for (now, if it was already)."""
        self._on_stop = call
        if self.stop_requested:
            call()

    def __enter__(self) -> SignalWatch:
        self._writer.setblocking(False)
        self._before_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        interrupt = signal.SIG_IGN if self.launcher_pid is not None else _take
        handlers = {signal.SIGTERM: _take, signal.SIGUSR1: _take, signal.SIGINT: interrupt}
        for number, handler in handlers.items():
            self._before[number] = signal.signal(number, handler)
        if sys.__stderr__ is not None:
            faulthandler.register(signal.SIGUSR2, file=sys.__stderr__, all_threads=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self._thread.join()
        signal.set_wakeup_fd(self._before_fd)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        faulthandler.unregister(signal.SIGUSR2)
        self._reader.close()
        self._writer.close()

    def _watch(self) -> None:
        grace = _Grace(self.heartbeat)
        while not self._closed:
            ready, _, _ = select.select([self._reader], [], [], LOOK_EVERY_SECONDS)
            numbers = set(self._reader.recv(4096)) if ready else set()
            if signal.SIGTERM in numbers:
                grace.begin()
            if numbers & {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}:
                self._request_stop()
            self.heartbeat.write_if_due()
            if grace.is_over() or (self.launcher_pid is not None and os.getppid() != self.launcher_pid):
                os._exit(ENDED_ON_SIGTERM)

    def _request_stop(self) -> None:
        if not self.stop_requested:
            self.stop_requested = True
            if self._on_stop is not None:
                self._on_stop()


@final
class _Grace:
    """How long the main thread has stood still since a SIGTERM."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat
        self.since: float | None = None
        self.beats = 0

    def begin(self) -> None:
        if self.since is None:
            self.since, self.beats = time.monotonic(), self.heartbeat.beats

    def is_over(self) -> bool:
        if self.since is None or self.heartbeat.phase in (Phase.SAVE, Phase.END):
            return False
        if self.heartbeat.beats != self.beats:
            self.since, self.beats = time.monotonic(), self.heartbeat.beats
        limit = max(GRACE_SECONDS, 2 * self.heartbeat.longest_gap_seconds)
        return time.monotonic() - self.since > limit
