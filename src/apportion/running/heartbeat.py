"""Where this rank is, for the launcher that watches it: `events/rank-N.jsonl`."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import final

from ..records import Event, Phase, to_json_text

# A day of training then adds 86,400 lines at most (about 10 MB), however fast the steps are.
WRITE_EVERY_SECONDS = 1.0


@final
class Heartbeat:
    """Remembers the rank's latest step and phase; another thread writes them down now and then.

    `beat` is cheap enough for every micro-batch: it touches no file. Without a path nothing is written until
    `open` gives one.
    """

    def __init__(self, path: Path | None, *, rank: int, attempt: int = 0) -> None:
        self.path = path
        self.rank = rank
        self.attempt = attempt
        self.phase = Phase.START
        self.step = 0
        self.beats = 0
        self.longest_gap_seconds = 0.0
        self._beat_at = time.monotonic()
        self._time = time.time()
        self._written_at = 0.0
        self._written_beats = -1
        self._lock = threading.Lock()

    def start(self) -> None:
        """Tell that the rank lives and takes signals."""
        self._write(ok=True)

    def open(self, path: Path) -> None:
        """Write to `path` from now on, if there was no path yet."""
        if self.path is None:
            self.path = path
            self._write(ok=True)

    def beat(self, step: int, phase: Phase) -> None:
        """Note that the rank is now in `phase` of `step`."""
        now = time.monotonic()
        if self.beats and self.phase is not Phase.SAVE:
            self.longest_gap_seconds = max(self.longest_gap_seconds, now - self._beat_at)
        self.step, self.phase, self._beat_at, self._time = step, phase, now, time.time()
        self.beats += 1

    def end(self, *, ok: bool) -> None:
        """Tell that the rank is through, well or not."""
        self.beat(self.step, Phase.END)
        self._write(ok=ok)

    def write_if_due(self) -> None:
        """Write the present place down if it is new and the last writing long enough ago."""
        due = time.monotonic() - self._written_at >= WRITE_EVERY_SECONDS
        if due and self.beats != self._written_beats and self.phase is not Phase.END:
            self._write(ok=True)

    def _write(self, *, ok: bool) -> None:
        if self.path is None:
            return
        with self._lock:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._written_beats, self._written_at = self.beats, time.monotonic()
            event = Event(
                time=self._time,
                rank=self.rank,
                pid=os.getpid(),
                step=self.step,
                phase=self.phase,
                attempt=self.attempt,
                ok=ok,
            )
            with self.path.open("a") as file:
                file.write(to_json_text(event, indent=None) + "\n")
