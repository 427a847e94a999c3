"""Signals at the launcher: the first asks the ranks to save and stop, a second Ctrl-C ends them at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import final

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# Wrappers (make, uv, shells) pass a Ctrl-C on to children that the terminal has already told.
SAME_KEY_SECONDS = 0.5


@final
class StopRequest:
    """Which stop was asked for so far; signal handlers set it, the launcher's loop reads it."""

    def __init__(self) -> None:
        self.save = False
        self.at_once = False
        self._first = 0.0

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Take a signal (the signature is that of Python's signal handlers)."""
        now = time.monotonic()
        if self.save and number == signal.SIGINT and now - self._first > SAME_KEY_SECONDS:
            self.at_once = True
        if not self.save:
            self.save, self._first = True, now


@contextmanager
def stop_signals(request: StopRequest) -> Iterator[None]:
    """Let signals reach `request` while the block runs; outside the main thread nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number in STOP_SIGNALS:
        if number == signal.SIGHUP and before[number] is signal.SIG_IGN:
            continue  # started under nohup: a closed terminal must not stop it
        signal.signal(number, request.handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
