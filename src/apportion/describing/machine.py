"""What is here: CUDA devices, or the CPU cores and memory that this process may use."""

from __future__ import annotations

import math
import os
from dataclasses import replace

import psutil
import torch

from ..errors import OptionError
from ..records import Cluster, Device, DeviceType, Link, Node
from .catalogue import find_cuda_kind
from .cgroup import core_quota, memory_room_bytes
from .measure import cpu_rates, cuda_rates
from .saved import read_calibration

GLOO_LINK = Link(kind="gloo", bandwidth_bytes_per_second=0.6e9, latency_seconds=1e-4)
"""Two ranks of one machine, torch 2.13: all_reduce 4.3-5.5 Gbit/s over a veth pair and 8.9 Gbit/s over
loopback, 0.11-0.41 ms for 4 bytes, which is two steps."""
PROCESS_BYTES = 320 * 2**20
"""Resident size of a process that has imported torch 2.13 and run a matmul (302 MiB, CPU build)."""


def describe_local(num_ranks: int | None) -> Cluster:
    """Return this machine with `num_ranks` devices: its GPUs, or CPU ranks that share cores and memory.

    None takes all GPUs, or one CPU rank with all cores. A saved calibration of this machine is used.

    Raises: OptionError for more GPUs than there are.
    """
    if torch.cuda.is_available():
        return _gpus(num_ranks)
    return _cpu(num_ranks or 1)


def _gpus(num_ranks: int | None) -> Cluster:
    available = torch.cuda.device_count()
    wanted = available if num_ranks is None else num_ranks
    if wanted > available:
        raise OptionError(
            f"local:{wanted} asks for more GPUs than there are", found=f"{available}", try_=f"local:{available}"
        )
    saved = read_calibration(DeviceType.CUDA)
    if saved is not None and saved.nodes[0].devices_per_node >= wanted:
        return replace(saved, name="local", nodes=(replace(saved.nodes[0], devices_per_node=wanted),))
    return gpu_cluster(wanted)


def gpu_cluster(num_ranks: int) -> Cluster:
    """Return the first `num_ranks` GPUs with the rates of the catalogue; memory is that of the device."""
    properties = torch.cuda.get_device_properties(0)
    kind = find_cuda_kind(properties.name)
    warnings: tuple[str, ...] = ()
    if kind is not None:
        device = replace(kind.device, memory_bytes=properties.total_memory)
        intra, inter = kind.intra_node, kind.inter_node(num_ranks)
    else:
        peaks, memory_rate = cuda_rates()
        device = Device(
            kind=properties.name,
            type=DeviceType.CUDA,
            memory_bytes=properties.total_memory,
            peak_flops_per_second=peaks,
            memory_bytes_per_second=memory_rate,
            efficiency=dict.fromkeys(peaks, 1.0),
            source="measured",
        )
        intra = Link(kind="pcie", bandwidth_bytes_per_second=16e9, latency_seconds=5.7e-6)
        inter = Link(kind="network", bandwidth_bytes_per_second=1.25e9, latency_seconds=3e-5)
        warnings = (
            f"{properties.name} is not in the device catalogue: its rates are measured, its links taken as "
            "PCIe 3.0 x16",
        )
    return Cluster(
        name="local",
        nodes=(
            Node(
                device=device,
                devices_per_node=num_ranks,
                host_memory_bytes=host_memory_bytes(),
                cores=num_cores(),
            ),
        ),
        intra_node=intra,
        inter_node=inter,
        warnings=warnings,
    )


def _cpu(num_ranks: int) -> Cluster:
    cores, memory = num_cores(), host_memory_bytes()
    saved = read_calibration(DeviceType.CPU)
    if saved is not None:
        node = saved.nodes[0]
        whole = node.devices_per_node
        peaks = {name: rate * whole for name, rate in node.device.peak_flops_per_second.items()}
        memory_rate, link = node.device.memory_bytes_per_second * whole, saved.intra_node
    else:
        peaks, memory_rate = cpu_rates(cores)
        link = GLOO_LINK
    cluster = cpu_cluster(
        num_ranks, peaks=peaks, memory_rate=memory_rate, link=link, cores=cores, memory_bytes=memory
    )
    return replace(cluster, calibrated=saved is not None)


def cpu_cluster(
    num_ranks: int,
    *,
    peaks: dict[str, float],
    memory_rate: float,
    link: Link,
    cores: int,
    memory_bytes: int,
) -> Cluster:
    """Return CPU ranks that each have an equal part of the machine's rates and memory."""
    usable = max(memory_bytes // num_ranks - PROCESS_BYTES, memory_bytes // (2 * num_ranks))
    device = Device(
        kind="cpu",
        type=DeviceType.CPU,
        memory_bytes=usable,
        peak_flops_per_second={name: rate / num_ranks for name, rate in peaks.items()},
        memory_bytes_per_second=memory_rate / num_ranks,
        source="measured",
    )
    warnings: tuple[str, ...] = ()
    if num_ranks > cores:
        warnings = (f"{num_ranks} processes share {cores} cores: they take turns, no step gets faster by them",)
    return Cluster(
        name="local" if num_ranks == 1 else f"local:{num_ranks}",
        nodes=(Node(device=device, devices_per_node=num_ranks, host_memory_bytes=memory_bytes, cores=cores),),
        intra_node=link,
        inter_node=link,
        warnings=warnings,
    )


def num_cores() -> int:
    """Return the cores that this process may use: its affinity, within the quota of its control group."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = core_quota()
    return max(1, allowed if quota is None else min(allowed, math.ceil(quota)))


def host_memory_bytes() -> int:
    """Return the bytes that new processes may take: what is available, within the control group's limit."""
    room = memory_room_bytes()
    available = psutil.virtual_memory().available
    return max(1, available if room is None else min(available, room))
