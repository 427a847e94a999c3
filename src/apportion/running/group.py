"""The process group of this rank: set up, settings that make a run repeatable, tear down."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ..errors import OptionError, RankError
from ..records import DeviceType

# What gloo puts into the text of the RuntimeErrors that it raises when a peer is gone or late: the path of the
# source file (gloo/transport/tcp/pair.cc and its neighbours; seen with torch 2.13).
GLOO_SOURCE = "gloo/transport"


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """This process's place and device."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device


def pick_device_type(local_world_size: int, wanted: DeviceType | None) -> DeviceType:
    """Return the device type for `local_world_size` ranks of this host; None leaves the choice.

    Raises: OptionError if GPUs are wanted and there are fewer than ranks.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted is None:
        return DeviceType.CUDA if gpus >= local_world_size else DeviceType.CPU
    if wanted is DeviceType.CUDA and gpus < local_world_size:
        raise OptionError(
            f"{local_world_size} ranks need {local_world_size} GPUs on this host",
            found=f"{gpus} visible",
            try_=f"--devices local:{gpus}" if gpus else "--devices local:N for N processes on the CPU",
        )
    return wanted


@contextmanager
def process_group(
    *, rank: int, local_rank: int, world_size: int, device_type: DeviceType, timeout_seconds: float
) -> Iterator[Group]:
    """Set the process group up, hand out this rank's Group, and tear it down after a good end.

    `MASTER_ADDR` and `MASTER_PORT` say where rank 0 is. A world of one has no process group. After an error
    nothing is torn down: that could wait for peers that are gone; the process is about to end.

    Raises: RankError if the ranks do not meet within the timeout.
    """
    device = torch.device("cpu")
    if device_type is DeviceType.CUDA:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    make_repeatable(device_type)
    if world_size > 1:
        _meet(rank, world_size, device, timeout_seconds)
    yield Group(rank=rank, local_rank=local_rank, world_size=world_size, device=device)
    if dist.is_initialized():
        dist.destroy_process_group()


def _meet(rank: int, world_size: int, device: torch.device, timeout_seconds: float) -> None:
    """Set up the default process group.

    PyTorch's agent keeps its store when it starts the ranks anew (torch 2.13), where they would find the
    addresses of the processes before them; so each attempt has keys of its own.
    """
    on_gpu = device.type == "cuda"
    timeout = datetime.timedelta(seconds=timeout_seconds)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=dist.PrefixStore(f"attempt-{attempt}-of-{world_size}", store),  # type: ignore[attr-defined]
            rank=rank,
            world_size=world_size,
            timeout=timeout,
            device_id=device if on_gpu else None,
        )
    except RuntimeError as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise RankError(
            f"rank {rank} did not meet the other {world_size - 1} ranks at {where}",
            found=str(error).split("\n", 1)[0],
            try_="start all ranks, and check that this address and port can be reached from every host",
        ) from error


def make_repeatable(device_type: DeviceType) -> None:
    """Choose algorithms that give the same bits each time; on the CPU they do anyway.

    On GPUs operations without such an algorithm warn. Memory that is about to be written is not filled first:
    that is for finding bugs and costs bandwidth.
    """
    if device_type is DeviceType.CUDA:
        torch.backends.cudnn.benchmark = False
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a property


def is_peer_failure(error: BaseException) -> bool:
    """Return whether `error`, or one that it was raised from, only says that another rank is gone or late."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError) or (isinstance(seen, RuntimeError) and GLOO_SOURCE in str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
