"""The limits that a Linux control group (a container, a batch job) puts on this process.

Source: kernel.org, cgroup-v2 "Memory" and "CPU" interface files; cgroup-v1 memory controller. Elsewhere than
on Linux there are none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_SELF = Path("/proc/self/cgroup")
_NO_LIMIT = 2**60
"""cgroup v1 writes a huge number for "no limit"."""


def core_quota(root: Path = _ROOT, own: Path = _SELF) -> float | None:
    """Return the cores' worth of time per second that the process may use, or None without a limit."""
    quotas = []
    for folder in _folders(root, own, ""):
        words = _text(folder / "cpu.max").split()
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
            quotas.append(int(words[0]) / int(words[1]))
    for folder in _folders(root, own, "cpu"):
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota and period:
            quotas.append(quota / period)
    return min(quotas, default=None)


def memory_room_bytes(root: Path = _ROOT, own: Path = _SELF) -> int | None:
    """Return the bytes left below the tightest memory limit, or None without one.

    File cache that the kernel drops on demand (inactive_file) counts as free.
    """
    rooms = [
        _room(folder, "memory.max", "memory.current", "inactive_file") for folder in _folders(root, own, "")
    ] + [
        _room(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        for folder in _folders(root, own, "memory")
    ]
    return min((room for room in rooms if room is not None), default=None)


def _room(folder: Path, limit_name: str, used_name: str, cache_name: str) -> int | None:
    limit = _number(folder / limit_name)
    if limit is None or limit > _NO_LIMIT:
        return None
    used = _number(folder / used_name) or 0
    for line in _text(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == cache_name and value.isdigit():
            used -= int(value)
    return max(0, limit - max(0, used))


def _folders(root: Path, own: Path, controller: str) -> Iterator[Path]:
    """Yield the process's group and its ancestors: of the unified hierarchy, or of a v1 controller."""
    for line in _text(own).splitlines():
        _, names, path = line.split(":", 2)
        if (names == "") == (controller == "") and (controller == "" or controller in names.split(",")):
            base = root / controller if controller else root
            folder = base / path.lstrip("/")
            while folder != base and base in folder.parents:
                yield folder
                folder = folder.parent
            yield base


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None
