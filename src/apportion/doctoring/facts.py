"""What this machine is, read without changing it."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import sys
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import psutil

OPTIONAL = ("transformers",)
_CGROUP = Path("/sys/fs/cgroup")
# A memory limit that cgroup v1 writes for "none" (kernel: PAGE_COUNTER_MAX, rounded to pages).
_NO_LIMIT = 2**60


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The findings of one look.

    Units: bytes; `cores` are those this process may use, `core_quota` what a container limits it to (0: no
    limit). `memory_limit_bytes` is that of the container (0: none). Limits of -1 are unlimited. `address` is
    what the host name resolves to, "" if it does not. `port_error` says why the port cannot be had.
    """

    python: tuple[int, int, int]
    torch: str
    torch_error: str = ""
    cuda_build: str = ""
    gpus: tuple[str, ...] = ()
    has_nvidia_device: bool = False
    gloo: bool = True
    cores: int
    core_quota: float = 0.0
    memory_bytes: int
    available_bytes: int
    memory_limit_bytes: int = 0
    shared_memory_bytes: int = 0
    host: str
    address: str
    port: int | None = None
    port_error: str = ""
    open_files: int
    locked_bytes: int
    omp_num_threads: str = ""
    run_dir: str
    run_dir_writable: bool = True
    disk_free_bytes: int
    optional: dict[str, str] = field(default_factory=dict)


def look(*, port: int | None, run_dir: Path) -> Facts:
    """Return the facts of this machine."""
    version, error, cuda, gpus, gloo = _torch()
    memory = psutil.virtual_memory()
    place = _existing(run_dir)
    host = socket.gethostname()
    return Facts(
        python=sys.version_info[:3],
        torch=version,
        torch_error=error,
        cuda_build=cuda,
        gpus=gpus,
        has_nvidia_device=Path("/dev/nvidiactl").exists(),
        gloo=gloo,
        cores=len(os.sched_getaffinity(0)),
        core_quota=_core_quota(),
        memory_bytes=memory.total,
        available_bytes=memory.available,
        memory_limit_bytes=_memory_limit(),
        shared_memory_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        host=host,
        address=_resolve(host),
        port=port,
        port_error=_port_error(port or 0),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        omp_num_threads=os.environ.get("OMP_NUM_THREADS", ""),
        run_dir=str(run_dir),
        run_dir_writable=os.access(place, os.W_OK),
        disk_free_bytes=shutil.disk_usage(place).free,
        optional={name: _version(name) for name in OPTIONAL},
    )


def _torch() -> tuple[str, str, str, tuple[str, ...], bool]:
    """Return torch's version, why it cannot be imported, its CUDA, the GPUs it sees, whether it has gloo."""
    if importlib.util.find_spec("torch") is None:
        return "", "not installed", "", (), False
    try:
        import torch
        import torch.distributed as dist
    except (ImportError, OSError) as error:
        return _version("torch"), " ".join(str(error).split()), "", (), False
    gpus = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    gloo = dist.is_available() and dist.is_gloo_available()
    return str(torch.__version__), "", torch.version.cuda or "", gpus, gloo


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _core_quota() -> float:
    """Return the cores that the container may use, or 0 without a limit (cgroup v2 cpu.max, v1 cpu.cfs_*)."""
    text = _read(_CGROUP / "cpu.max")
    if text:
        quota, _, period = text.partition(" ")
    else:
        quota = _read(_CGROUP / "cpu" / "cpu.cfs_quota_us")
        period = _read(_CGROUP / "cpu" / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else 0.0


def _memory_limit() -> int:
    """Return the memory that the container may use, or 0 without a limit (cgroup v2, v1)."""
    text = _read(_CGROUP / "memory.max") or _read(_CGROUP / "memory" / "memory.limit_in_bytes")
    return int(text) if text.isdigit() and int(text) < _NO_LIMIT else 0


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _resolve(host: str) -> str:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return ""


def _port_error(port: int) -> str:
    """Return why nothing can listen on the port (0: on any port) of this host, or ""."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the rendezvous binds it: connections that have just ended do not hold it.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def _existing(path: Path) -> Path:
    """Return the nearest folder above a path that is there."""
    folder = path.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return folder
