"""Being one of several processes that somebody else's launcher started."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import OptionError

# Below the range from which Linux takes the ports of outgoing connections (32768-60999 by default,
# Documentation/networking/ip-sysctl.rst, ip_local_port_range).
FIRST_PORT, NUM_PORTS = 20000, 10000


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedGroup:
    """This process's place in the group, and where rank 0 is reached. `launcher` names who started it."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int

    def env(self) -> dict[str, str]:
        """Return the variables that `init_process_group` and PyTorch's tools read."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }


def joined(env: Mapping[str, str]) -> JoinedGroup | None:
    """Return the group that `env` (usually `os.environ`) puts this process in, or None.

    torchrun's variables (`RANK`, `WORLD_SIZE`) come first, then those of a Slurm step, Open MPI and PMI. A
    Slurm or MPI "group" of one process is none: a shell inside an allocation looks like that.

    Raises: OptionError if variables contradict each other, or nothing says where rank 0 is.
    """
    for read in (_torchrun, _slurm, _open_mpi, _pmi):
        group = read(env)
        if group is not None:
            if not 0 <= group.rank < group.world_size:
                raise OptionError(
                    f"rank {group.rank} does not exist in a group of {group.world_size} ({group.launcher})",
                    try_="start all processes with one launcher, or unset RANK and WORLD_SIZE",
                )
            return group
    return None


def _torchrun(env: Mapping[str, str]) -> JoinedGroup | None:
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    rank, world_size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    alone = world_size == 1
    local_world_size = _number(env, "LOCAL_WORLD_SIZE", world_size)
    local_rank = _number(env, "LOCAL_RANK", rank % local_world_size)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing and not alone:
        raise OptionError(
            f"RANK and WORLD_SIZE are set, but not {' and '.join(missing)}",
            found=f"RANK={rank} WORLD_SIZE={world_size}",
            try_="set the address and port of rank 0, or unset RANK and WORLD_SIZE to start processes here",
        )
    return JoinedGroup(
        launcher="torchrun" if "TORCHELASTIC_RUN_ID" in env else "environment",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(env, "MASTER_PORT", FIRST_PORT),
    )


def _slurm(env: Mapping[str, str]) -> JoinedGroup | None:
    if "SLURM_PROCID" not in env or "SLURM_STEP_ID" not in env:
        return None  # a batch script itself has SLURM_PROCID=0, but is no step
    world_size = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
    key = f"slurm {env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}"
    rank, local_rank = _number(env, "SLURM_PROCID"), _number(env, "SLURM_LOCALID", 0)
    per_node = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", ""), _number(env, "SLURM_NODEID", 0))
    place = _Place("Slurm", rank, world_size, local_rank, per_node or world_size)
    return _group(place, env, first_host(nodes), key)


def _open_mpi(env: Mapping[str, str]) -> JoinedGroup | None:
    if "OMPI_COMM_WORLD_RANK" not in env or "OMPI_COMM_WORLD_SIZE" not in env:
        return None
    world_size = _number(env, "OMPI_COMM_WORLD_SIZE")
    local_size = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", world_size)
    local_rank = _number(env, "OMPI_COMM_WORLD_LOCAL_RANK", 0)
    place = _Place("Open MPI", _number(env, "OMPI_COMM_WORLD_RANK"), world_size, local_rank, local_size)
    key = f"mpi {env.get('PMIX_NAMESPACE', env.get('OMPI_MCA_ess_base_jobid', ''))}"
    return _group(place, env, "127.0.0.1" if local_size == world_size else "", key)


def _pmi(env: Mapping[str, str]) -> JoinedGroup | None:
    if "PMI_RANK" not in env or "PMI_SIZE" not in env:
        return None
    rank, world_size = _number(env, "PMI_RANK"), _number(env, "PMI_SIZE")
    local_size = _number(env, "MPI_LOCALNRANKS", _number(env, "PMI_LOCAL_SIZE", 0))
    local_rank = _number(env, "MPI_LOCALRANKID", _number(env, "PMI_LOCAL_RANK", rank))
    place = _Place("MPI", rank, world_size, local_rank, local_size or world_size)
    address = "127.0.0.1" if local_size == world_size else ""
    return _group(place, env, address, f"pmi {env.get('PMI_ID', env.get('PMI_PORT', ''))}")


@dataclass(frozen=True, slots=True)
class _Place:
    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def _group(place: _Place, env: Mapping[str, str], address: str, key: str) -> JoinedGroup | None:
    """Return the group of `place`, rank 0 at MASTER_ADDR or `address`, on MASTER_PORT or one made of `key`."""
    if place.world_size == 1:
        return None
    address = env.get("MASTER_ADDR", address)
    if not address:
        raise OptionError(
            f"{place.launcher} started {place.world_size} processes, but nothing says where rank 0 is",
            try_="set MASTER_ADDR to the host of rank 0 for all of them (mpirun: -x MASTER_ADDR=HOST)",
        )
    return JoinedGroup(
        launcher=place.launcher,
        rank=place.rank,
        world_size=place.world_size,
        local_rank=place.local_rank,
        local_world_size=place.local_world_size,
        master_addr=address,
        master_port=_number(env, "MASTER_PORT", port_of(key)),
    )


def port_of(key: str) -> int:
    """Return a port that all processes with the same `key` agree on."""
    digest = hashlib.sha256(key.encode()).digest()
    return FIRST_PORT + int.from_bytes(digest[:4], "big") % NUM_PORTS


def first_host(nodes: str) -> str:
    """Return the first host of a Slurm node list: `a[03-05,9],b` is `a03`, "" is ""."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\])?([^\[,]*)", nodes)
    return "" if match is None else match[1] + (match[2] or "") + match[3]


def _tasks_per_node(text: str, node: int) -> int:
    """Return the entry of node number `node` in `2(x3),1`, or 0 if the text does not say."""
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(repeat or 1)
    return counts[node] if node < len(counts) else 0


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdigit():
        raise OptionError(f"{name} is '{text}', not a number", try_="start the processes with one launcher")
    return int(text)
