"""The launcher's eyes on its ranks: what they write, where they are, whether they live."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar, final

import psutil

from ..records import Event, Phase, from_json_text

T = TypeVar("T")
PHASES = {phase: place for place, phase in enumerate(Phase)}
DOING = {
    Phase.START: "starting",
    Phase.DATA: "loading the data of",
    Phase.STEP: "in",
    Phase.VALIDATION: "validating after",
    Phase.SAVE: "saving after",
    Phase.END: "done after",
}


@final
class Tail:
    """The text added to a file since the last look; a file put in its place is read from its start."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self._rest = b""
        status = path.stat() if from_end and path.exists() else None
        self._file, self._offset = (status.st_ino, status.st_size) if status else (0, 0)

    def read(self) -> str:
        """Return what is new, whole UTF-8 characters only."""
        if not self.path.exists():
            return ""
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._file or status.st_size < self._offset:
                self._file, self._offset, self._rest = status.st_ino, 0, b""
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        data = self._rest + data
        whole = _whole_characters(data)
        self._rest = data[whole:]
        return data[:whole].decode(errors="replace")


def _whole_characters(data: bytes) -> int:
    """Return how many bytes of `data` do not belong to a character cut off at its end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:  # the first byte of a character
            length = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - (back if length > back else 0)
    return len(data)


@final
class Lines(Generic[T]):
    """The records that are added to a file of JSON lines from now on."""

    def __init__(self, path: Path, cls: type[T]) -> None:
        self._tail = Tail(path, from_end=True)
        self._cls = cls
        self._rest = ""

    def read(self) -> tuple[T, ...]:
        """Return the new records; a line that is still being written comes next time."""
        *lines, self._rest = (self._rest + self._tail.read()).split("\n")
        return tuple(from_json_text(self._cls, line) for line in lines if line)


def position(event: Event) -> tuple[int, int]:
    """Return a pair that grows as the rank goes on."""
    return event.step, PHASES[event.phase]


def place_of(event: Event | None) -> str:
    """Say where a rank is: "in step 12", "loading the data of step 3"."""
    if event is None or event.phase is Phase.START:
        return "starting"
    return f"{DOING[event.phase]} step {event.step}"


def behind(latest: Mapping[int, Event], num_ranks: int) -> list[int]:
    """Return the ranks that are least far; those without an event are the least far of all."""
    silent = [rank for rank in range(num_ranks) if rank not in latest]
    if silent:
        return silent
    running = {rank: event for rank, event in latest.items() if event.phase is not Phase.END}
    least = min((position(event) for event in running.values()), default=(0, 0))
    return sorted(rank for rank, event in running.items() if position(event) == least)


def is_alive(pid: int) -> bool:
    """Return whether process `pid` runs; one that ended and waits for its parent does not."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def started_ranks(task: Path) -> list[int]:
    """Return the process ids of the ranks that this process started for `task`."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if str(task) in child.cmdline():
                found.append(child.pid)
    return found


def send(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes, some of which may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_groups(leaders: Iterable[int]) -> None:
    """Kill ranks and what they started (data workers); a rank leads its process group."""
    for leader in leaders:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
