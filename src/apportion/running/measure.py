"""How long a step of a candidate takes and what memory it needs, for `compare`."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, final

import psutil
import torch
import torch.distributed as dist

from ..reading import JobParts
from ..records import Job, Measured, Phase
from .train import Beat, Trainable

# The first steps fill caches, allocate optimizer state and settle allocators.
WARM_UP_STEPS = 2
SAMPLE_EVERY_SECONDS = 0.005


def measure_rank(
    parts: JobParts, job: Job, session: Trainable, *, name: str, steps: int, beat: Beat, baseline_bytes: int
) -> Measured:
    """Run WARM_UP_STEPS and `steps` more, and return what the latter took; collective, the same everywhere.

    Units: `baseline_bytes` is the process's resident memory before the model was built (`resident_bytes`); the
    peak on CPU is counted from it. On GPU it is the allocator's peak during these steps.
    """
    batches = _batches(parts, job, session)
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds: list[float] = []
    loss = float("nan")
    with _peak_resident() as peak:
        for step in range(1, WARM_UP_STEPS + steps + 1):
            beat(step, Phase.DATA)
            batch = next(batches)
            beat(step, Phase.STEP)
            started = time.perf_counter()
            loss = session.step(batch).loss
            seconds.append(time.perf_counter() - started)
    bytes_here = torch.cuda.max_memory_allocated() if on_gpu else peak.bytes - baseline_bytes
    median, peak_bytes = _largest(statistics.median(seconds[WARM_UP_STEPS:]), float(bytes_here))
    return Measured(name=name, step_seconds=median, peak_bytes=int(peak_bytes), loss=loss, steps=steps)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def _batches(parts: JobParts, job: Job, session: Trainable) -> Iterator[Any]:
    """Yield batches for ever: epoch after epoch of the data, or the one batch of a one-batch job."""
    if parts.data is None:
        return itertools.repeat(parts.example(job.batch_size))
    loader: Iterable[Any] = session.loader(
        parts.data("train"), batch_size=job.batch_size, collate=parts.collate, num_workers=job.num_workers
    )
    return itertools.chain.from_iterable(itertools.repeat(loader))


def _largest(*values: float) -> tuple[float, ...]:
    """Return the largest of each value over all ranks."""
    if not dist.is_initialized():
        return values
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, values)
    return tuple(max(column) for column in zip(*everyone, strict=True))


@final
class _Peak:
    """The largest resident memory seen, in bytes."""

    def __init__(self) -> None:
        self.bytes = resident_bytes()


@contextmanager
def _peak_resident() -> Iterator[_Peak]:
    """Look at the resident memory every few milliseconds while the block runs."""
    peak, done = _Peak(), threading.Event()

    def look() -> None:
        process = psutil.Process()
        while not done.wait(SAMPLE_EVERY_SECONDS):
            peak.bytes = max(peak.bytes, int(process.memory_info().rss))

    thread = threading.Thread(target=look, name="memory", daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
