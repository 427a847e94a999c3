"""Short measurements of this machine's arithmetic and memory; under 0.2 s unless asked for longer."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_QUICK_SECONDS = 0.025
_MATRIX_SIDE = 384
_LARGE_MATRIX_SIDE = 2048
_COPY_ELEMENTS = 2**23
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_CUDA_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@functools.cache
def cpu_rates(cores: int) -> tuple[dict[str, float], float]:
    """Return matmul FLOP/s by precision and memory bytes/s of all `cores` together, measured quickly once."""
    return measure_cpu(cores, seconds=_QUICK_SECONDS, side=_MATRIX_SIDE)


def measure_cpu(cores: int, *, seconds: float, side: int) -> tuple[dict[str, float], float]:
    """Return matmul FLOP/s by precision and memory bytes/s of all `cores` together.

    Each figure is the best of runs with one thread and with `cores` threads, since a busy machine can make
    the latter slower. `seconds` is spent per figure, `side` is that of the square matrices.
    """
    device = torch.device("cpu")
    peaks = dict.fromkeys(_DTYPES, 0.0)
    memory_rate = 0.0
    for threads in {1, cores}:
        with _threads(threads):
            for name, dtype in _DTYPES.items():
                rate = matmul_rate(device, dtype, seconds=seconds, side=side)
                peaks[name] = max(peaks[name], rate)
            memory_rate = max(memory_rate, copy_rate(device, seconds=seconds))
    return peaks, memory_rate


@functools.cache
def cuda_rates() -> tuple[dict[str, float], float]:
    """Return matmul FLOP/s by precision and memory bytes/s of the first GPU."""
    device = torch.device("cuda", 0)
    side = 2 * _LARGE_MATRIX_SIDE
    peaks = {name: matmul_rate(device, d, seconds=0.05, side=side) for name, d in _CUDA_DTYPES.items()}
    return peaks, copy_rate(device, seconds=0.05)


def matmul_rate(device: torch.device, dtype: torch.dtype, *, seconds: float, side: int) -> float:
    """Return the FLOP/s of square matmuls, the fastest of as many as `seconds` allow and of two at least."""
    a = torch.rand(side, side, device=device).to(dtype)
    b = torch.rand(side, side, device=device).to(dtype)
    out = torch.empty(side, side, device=device, dtype=dtype)
    best = _fastest(lambda: torch.mm(a, b, out=out), device, seconds)
    return float(2 * side**3 / best)


def copy_rate(device: torch.device, *, seconds: float) -> float:
    """Return the bytes per second, read and written, of large copies."""
    elements = _COPY_ELEMENTS * (16 if device.type == "cuda" else 1)
    a = torch.zeros(elements, device=device)
    b = torch.zeros(elements, device=device)
    return 2 * a.numel() * a.element_size() / _fastest(lambda: b.copy_(a), device, seconds)


def _fastest(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    best, spent, runs = float("inf"), 0.0, 0
    while runs < 2 or spent < seconds:
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elapsed = time.perf_counter() - start
        best, spent, runs = min(best, elapsed), spent + elapsed, runs + 1
    return best


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
