"""A longer measurement of this machine: matmul, memory, and all-reduce between two processes."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace

import torch

from ..errors import RankError
from ..records import Cluster, Device, Link
from .machine import GLOO_LINK, cpu_cluster, gpu_cluster, host_memory_bytes, num_cores
from .measure import copy_rate, matmul_rate, measure_cpu

_SECONDS = 0.5
_CPU_SIDE = 1024
_CUDA_SIDE = 8192
_CUDA_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_TIMEOUT_SECONDS = 120
_LARGE_BYTES = 16 * 2**20

_PAIR = """\
import sys, time
import torch
import torch.distributed as dist
rank, port, large = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
def fastest(elements, runs):
    tensor, best = torch.zeros(elements), float("inf")
    for _ in range(runs):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        best = min(best, time.perf_counter() - start)
    return best
small, big = fastest(1, 50), fastest(large // 4, 10)
if rank == 0:
    print(small, big)
dist.destroy_process_group()
"""


def measure_machine() -> Cluster:
    """Return this machine with measured rates: all its GPUs, or its CPU with one rank per core.

    Takes a few seconds. On GPUs the datasheet peak stays (MFU refers to it) and the efficiency is measured;
    their links keep the catalogue's rates.

    Raises: RankError if the two processes that measure the link fail.
    """
    if torch.cuda.is_available():
        return _calibrate_gpus()
    cores = num_cores()
    peaks, memory_rate = measure_cpu(cores, seconds=_SECONDS, side=_CPU_SIDE)
    cluster = cpu_cluster(
        cores,
        peaks=peaks,
        memory_rate=memory_rate,
        link=measure_gloo_link(),
        cores=cores,
        memory_bytes=host_memory_bytes(),
    )
    return replace(cluster, calibrated=True)


def _calibrate_gpus() -> Cluster:
    cluster = gpu_cluster(torch.cuda.device_count())
    node = cluster.nodes[0]
    where = torch.device("cuda", 0)
    device: Device = node.device
    efficiency = dict(device.efficiency)
    for name, dtype in _CUDA_DTYPES.items():
        peak = device.peak_flops_per_second.get(name)
        if peak:
            efficiency[name] = matmul_rate(where, dtype, seconds=_SECONDS, side=_CUDA_SIDE) / peak
    efficiency["memory"] = copy_rate(where, seconds=_SECONDS) / device.memory_bytes_per_second
    measured = replace(device, efficiency=efficiency, source="measured")
    return replace(cluster, nodes=(replace(node, device=measured),), calibrated=True)


def measure_gloo_link() -> Link:
    """Return the link between two gloo processes of this machine, from their all_reduce.

    Model:  two ranks: payload / bandwidth + 2 latencies (`costing.collective`).
    Raises: RankError with what the failing process wrote.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _PAIR, str(rank), port, str(_LARGE_BYTES)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=_TIMEOUT_SECONDS) for rank in ranks]
    except subprocess.TimeoutExpired:
        raise RankError(
            "measuring the link between two processes took too long", found=f"{_TIMEOUT_SECONDS} s"
        ) from None
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for rank, (_, complaint) in zip(ranks, outputs, strict=True):
        if rank.returncode:
            last = complaint.strip().splitlines()[-1:] or [f"exit code {rank.returncode}"]
            raise RankError("measuring the link between two processes failed", found=last[0])
    small, big = (float(word) for word in outputs[0][0].split())
    bandwidth = _LARGE_BYTES / max(big - small, big / 10)
    return replace(GLOO_LINK, bandwidth_bytes_per_second=bandwidth, latency_seconds=small / 2)
