"""Judge the facts of a machine. Pure: facts in, checks out."""

from __future__ import annotations

from ..records import CheckStatus, MachineCheck
from ..units import format_bytes
from .facts import Facts

MIN_PYTHON = (3, 11)
# pyproject.toml: torch>=2.13.
MIN_TORCH = (2, 13)
# Docker's default for /dev/shm (docs.docker.com, docker run --shm-size), too little for loader workers.
DOCKER_SHARED_BYTES = 64 * 2**20
# Below these a checkpoint of even a small model may not fit, or a rank may be killed; deliberately low.
LOW_DISK_BYTES, NO_DISK_BYTES = 5 * 2**30, 256 * 2**20
LOW_MEMORY_BYTES = 2 * 2**30
# Each loader worker keeps some tens of descriptors open; Linux's usual soft limit is 1024 (getrlimit(2)).
LOW_OPEN_FILES = 4096

_OK, _WARNING, _PROBLEM = CheckStatus.OK, CheckStatus.WARNING, CheckStatus.PROBLEM


def check_facts(facts: Facts) -> tuple[MachineCheck, ...]:
    """Return every check, in the order in which one would mend them."""
    checks = (
        _python, _torch, _devices, _gloo, _cores, _threads, _memory, _shared_memory, _disk, _host, _port,
        _open_files, _locked_memory, _optional,
    )  # fmt: skip
    return tuple(check(facts) for check in checks)


def _check(name: str, status: CheckStatus, found: str, fix: str = "") -> MachineCheck:
    return MachineCheck(name=name, status=status, found=found, fix="" if status is _OK else fix)


def _python(facts: Facts) -> MachineCheck:
    status = _OK if facts.python >= MIN_PYTHON else _PROBLEM
    return _check("python", status, ".".join(map(str, facts.python)), "install Python 3.11 or newer")


def _torch(facts: Facts) -> MachineCheck:
    if facts.torch_error:
        found = f"{facts.torch} {facts.torch_error}".strip()
        return _check("torch", _PROBLEM, found, "pip install --force-reinstall 'torch>=2.13'")
    build = f"built for CUDA {facts.cuda_build}" if facts.cuda_build else "CPU build"
    status = _OK if _numbers(facts.torch) >= MIN_TORCH else _PROBLEM
    return _check("torch", status, f"{facts.torch}, {build}", "pip install 'torch>=2.13'")


def _numbers(version: str) -> tuple[int, ...]:
    """Return (2, 13) for `2.13.0+cpu`."""
    parts = version.partition("+")[0].split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())


def _devices(facts: Facts) -> MachineCheck:
    if facts.gpus:
        kinds = {name: facts.gpus.count(name) for name in facts.gpus}
        found = ", ".join(f"{count} x {name}" for name, count in kinds.items())
        mixed = "ranks wait for the slowest kind; choose one with CUDA_VISIBLE_DEVICES"
        return _check("devices", _OK if len(kinds) == 1 else _WARNING, found, mixed)
    if facts.has_nvidia_device and not facts.cuda_build:
        fix = "install a CUDA build of torch (pytorch.org/get-started)"
        return _check("devices", _WARNING, "an NVIDIA driver is loaded, but torch is a CPU build", fix)
    if facts.has_nvidia_device:
        fix = "compare `nvidia-smi` with torch's CUDA version; unset CUDA_VISIBLE_DEVICES if it is empty"
        return _check("devices", _WARNING, "an NVIDIA driver is loaded, but torch sees no GPU", fix)
    return _check("devices", _OK, "no GPU: ranks run on CPU cores")


def _gloo(facts: Facts) -> MachineCheck:
    found = "gloo is there" if facts.gloo else "torch has no gloo backend"
    return _check(
        "collectives", _OK if facts.gloo else _PROBLEM, found, "install a torch wheel from pytorch.org"
    )


def _usable_cores(facts: Facts) -> float:
    return min(facts.cores, facts.core_quota) if facts.core_quota else float(facts.cores)


def _cores(facts: Facts) -> MachineCheck:
    usable = _usable_cores(facts)
    quota = f", limited to {facts.core_quota:g} by the container" if facts.core_quota else ""
    found = f"{facts.cores} core{'s' * (facts.cores != 1)}{quota}"
    fix = "give the container whole cores (--cpus), at least one per rank"
    return _check("cores", _OK if usable >= 2 else _WARNING, found, fix)


def _threads(facts: Facts) -> MachineCheck:
    text, usable = facts.omp_num_threads, max(1, int(_usable_cores(facts)))
    if not text:
        return _check("threads", _OK, "OMP_NUM_THREADS is not set: each rank gets its share of the cores")
    fix = f"unset OMP_NUM_THREADS, or set it to {usable} divided by the ranks per node"
    if not text.isdigit() or int(text) < 1:
        return _check("threads", _PROBLEM, f"OMP_NUM_THREADS is '{text}'", fix)
    status = _OK if int(text) <= usable else _WARNING
    return _check("threads", status, f"OMP_NUM_THREADS is {text} for {usable} cores", fix)


def _memory(facts: Facts) -> MachineCheck:
    limit = facts.memory_limit_bytes
    free = min(facts.available_bytes, limit) if limit else facts.available_bytes
    inside = f", limited to {format_bytes(limit)} by the container" if limit else ""
    found = f"{format_bytes(free)} free of {format_bytes(facts.memory_bytes)}{inside}"
    fix = "end other programs, or raise the container's limit (--memory)"
    return _check("memory", _OK if free >= LOW_MEMORY_BYTES else _WARNING, found, fix)


def _shared_memory(facts: Facts) -> MachineCheck:
    size = facts.shared_memory_bytes
    status = _OK if size > DOCKER_SHARED_BYTES else _WARNING
    fix = "start the container with --shm-size=8g (or --ipc=host), or use --num-workers 0"
    return _check("shared memory", status, f"/dev/shm has {format_bytes(size)}", fix)


def _disk(facts: Facts) -> MachineCheck:
    if not facts.run_dir_writable:
        return _check("disk", _PROBLEM, f"{facts.run_dir} cannot be written", "choose another with --run-dir")
    free = facts.disk_free_bytes
    status = _OK if free >= LOW_DISK_BYTES else _WARNING if free >= NO_DISK_BYTES else _PROBLEM
    fix = "free some space, or keep runs elsewhere with --run-dir"
    return _check("disk", status, f"{format_bytes(free)} free for {facts.run_dir}", fix)


def _host(facts: Facts) -> MachineCheck:
    if not facts.address:
        fix = f"add a line '127.0.0.1 {facts.host}' to /etc/hosts"
        return _check("host name", _WARNING, f"{facts.host} does not resolve", fix)
    return _check("host name", _OK, f"{facts.host} is {facts.address}")


def _port(facts: Facts) -> MachineCheck:
    if facts.port is None:
        found = f"no port can be had: {facts.port_error}" if facts.port_error else "a free port can be had"
        fix = "allow sockets on the loopback interface"
        return _check("port", _PROBLEM if facts.port_error else _OK, found, fix)
    if not facts.port_error:
        return _check("port", _OK, f"{facts.port} is free")
    fix = f"another port, or end what listens (ss -ltnp 'sport = :{facts.port}')"
    return _check("port", _PROBLEM, f"{facts.port}: {facts.port_error}", fix)


def _open_files(facts: Facts) -> MachineCheck:
    limit = facts.open_files
    status = _OK if limit < 0 or limit >= LOW_OPEN_FILES else _WARNING
    found = "unlimited" if limit < 0 else f"at most {limit}"
    return _check("open files", status, found, "ulimit -n 65536 before starting, for many loader workers")


def _locked_memory(facts: Facts) -> MachineCheck:
    limit = facts.locked_bytes
    found = "unlimited" if limit < 0 else f"at most {format_bytes(limit)}"
    # Only network cards with RDMA need to lock much (NCCL documentation, Troubleshooting: memory limits).
    status = _OK if limit < 0 or not facts.gpus else _WARNING
    return _check("locked memory", status, found, "ulimit -l unlimited, for InfiniBand between nodes")


def _optional(facts: Facts) -> MachineCheck:
    there = [f"{name} {version}" for name, version in facts.optional.items() if version]
    missing = [f"{name} is not installed" for name, version in facts.optional.items() if not version]
    return _check("optional", _OK, ", ".join([*there, *missing]))
