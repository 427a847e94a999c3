"""The directories of checkpoints: written beside, moved into place, found again.

root/step-100/            finished: DCP's files and meta.json
root/step-100.tmp-XXXX/   being written, or left by a run that was killed; never read
root/step-100.old/        set aside for the moment in which step-100 is written anew
root/latest               text, the name of the newest finished one; moved last
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

from ..errors import TargetError

META = "meta.json"
LATEST = "latest"
_STEP = re.compile(r"step-(\d+)(\.old)?")
_LEFTOVER = re.compile(r"(step-\d+|latest)\.tmp-.*")
_CHUNK_BYTES = 2**22


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSum:
    """One file of a checkpoint: its name, its size in bytes and the CRC-32 of its content."""

    name: str
    bytes: int
    crc32: int


def step_name(step: int) -> str:
    return f"step-{step}"


def sum_file(path: Path) -> FileSum:
    """Return size and checksum of a file."""
    crc, size = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc, size = zlib.crc32(chunk, crc), size + len(chunk)
    return FileSum(name=path.name, bytes=size, crc32=crc)


def check_file(directory: Path, expected: FileSum) -> None:
    """Compare a file with what was noted when it was written.

    Raises: TargetError that names the file.
    """
    path = directory / expected.name
    if not path.is_file():
        raise damaged(path, "the file is missing")
    size = path.stat().st_size
    if size != expected.bytes:
        raise damaged(path, f"{size} bytes where {expected.bytes} were written")
    if sum_file(path).crc32 != expected.crc32:
        raise damaged(path, "its checksum differs from the one noted when it was written")


def damaged(path: Path, found: str) -> TargetError:
    """Return the error for a checkpoint file that cannot be used; it names an older checkpoint to take."""
    directory = path.parent
    older = older_checkpoints(directory)
    advice = f"resume from {older[0]}" if older else "start anew: there is no older checkpoint beside it"
    return TargetError(f"the checkpoint file {path} is damaged", found=found, try_=advice)


def sync_directory(path: Path) -> None:
    """Make renames in a directory durable (POSIX; elsewhere directories cannot be opened)."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_durably(path: Path, text: str) -> None:
    """Replace a text file in one step, durable before it is seen."""
    beside = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def make_beside(root: Path, step: int) -> Path:
    """Return a new empty directory next to the checkpoint's place, after removing what killed runs left."""
    root.mkdir(parents=True, exist_ok=True)
    for path in root.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            _remove(path)
    beside = root / f"{step_name(step)}.tmp-{secrets.token_hex(4)}"
    beside.mkdir()
    return beside


def move_into_place(beside: Path, step: int) -> Path:
    """Give a written checkpoint its name, then let `latest` point to it; return its path."""
    root = beside.parent
    final, aside = root / step_name(step), root / f"{step_name(step)}.old"
    sync_directory(beside)
    if final.exists():
        _remove(aside)
        final.rename(aside)
    beside.rename(final)
    sync_directory(root)
    write_durably(root / LATEST, final.name + "\n")
    _remove(aside)
    return final


def remove_older(root: Path, step: int, keep: int) -> None:
    """Leave `keep` checkpoints up to `step`. Later ones, of a run that was taken back, are left alone."""
    earlier = [path for path in _finished(root) if _order(path)[0] <= step]
    for path in earlier[max(keep, 1) :]:
        _remove(path)


def latest_checkpoint(root: Path) -> Path | None:
    """Return the newest finished checkpoint: the one that `latest` names, else the one with the most steps."""
    finished = _finished(root)
    pointer = root / LATEST
    if pointer.is_file():
        named = root / pointer.read_text(encoding="utf-8").strip()
        if named in finished:
            return named
    return finished[0] if finished else None


def older_checkpoints(path: Path) -> tuple[Path, ...]:
    """Return the finished checkpoints beside `path` with fewer steps, newest first."""
    if _STEP.fullmatch(path.name) is None:
        return ()
    return tuple(other for other in _finished(path.parent) if _order(other) < _order(path))


def _finished(root: Path) -> list[Path]:
    if not root.is_dir():
        return []
    paths = [path for path in root.iterdir() if _STEP.fullmatch(path.name) and (path / META).is_file()]
    return sorted(paths, key=_order, reverse=True)


def _order(path: Path) -> tuple[int, bool]:
    match = _STEP.fullmatch(path.name)
    assert match is not None
    return int(match[1]), match[2] is None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
