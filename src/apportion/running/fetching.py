"""Read samples and make portions of them, in the main process or in a data worker.

Note [Sample draws]
Random augmentation belongs to the sample. Before a sample is read, Python's, numpy's and torch's default
generators are seeded from (seed, epoch, dataset index), so that the draws are the same for any number of ranks
and workers and after a resume; the process's own states are put back afterwards. Collating is seeded by the
global batch. Generators that a dataset owns itself (`numpy.random.default_rng()` kept in an attribute) are out
of reach: they advance with every sample that this process reads.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ..errors import ApportionError, TargetError
from ..torch_private import hidden_worker_info, tree_map
from .sampling import Cut, Request, draw_key

Batch = Any
Collate = Callable[[list[Any]], Batch]

_SKIP_SAMPLES = 64  # read and dropped at a time, so that few are held at once
_COLLATE, _STREAM = 1, 2  # set the key of a batch's collating and of a stream's start apart from a sample's


@runtime_checkable
class MapStyle(Protocol):
    """A dataset with a length and items by position."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class TellsEpoch(Protocol):
    """A stream that shuffles by itself and wants to know the epoch."""

    def set_epoch(self, epoch: int, /) -> object: ...


def _pin(leaf: Any) -> Any:
    return leaf.pin_memory() if isinstance(leaf, torch.Tensor) else leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward pass of one rank: the collated samples at positions [start, stop) of the global batch.

    start == stop marks a padding micro-batch: `batch` holds one real sample of the global batch whose weight
    is 0, so that a rank without samples still takes part in every collective.
    """

    batch: Batch
    start: int
    stop: int

    def pin_memory(self) -> MicroBatch:
        return replace(self, batch=tree_map(_pin, self.batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """What one rank takes of a global batch of `total` samples; as many micro-batches as on every other rank.

    `index` is the number of the global batch within the epoch, from 0.
    """

    micro_batches: tuple[MicroBatch, ...]
    total: int
    epoch: int
    index: int

    def pin_memory(self) -> Portion:
        return replace(self, micro_batches=tuple(micro.pin_memory() for micro in self.micro_batches))


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """An error on its way out of a data worker, with the traceback it had there."""

    error: ApportionError
    trace: str


@contextmanager
def own_draws() -> Iterator[None]:
    """Put the default generators of Python, numpy and torch (CPU) back as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_draws(*words: int) -> None:
    """Seed the default generators of Python, numpy and torch (CPU) from integers."""
    key = draw_key(*words)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    torch.default_generator.manual_seed(key)


def describe_error(error: Exception) -> str:
    """Return type, message and place of an exception in one line."""
    text = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} ({frames[-1].filename}:{frames[-1].lineno})" if frames else text


def fetch_sample(dataset: MapStyle, index: int, *, seed: int, epoch: int) -> Any:
    """Return `dataset[index]` with the draws of that sample; leaves the generators seeded.

    Raises: TargetError that names the index.
    """
    seed_draws(seed, epoch, index)
    try:
        return dataset[index]
    except Exception as error:
        raise TargetError(
            f"sample {index} of the dataset cannot be read",
            found=describe_error(error),
            try_=f"look at dataset[{index}], or leave that sample out of the dataset",
        ) from error


def collate_samples(collate: Collate, samples: list[Any], indices: list[int], *, key: tuple[int, ...]) -> Batch:
    """Return the collated samples; leaves the generators seeded.

    Raises: TargetError that names the samples.
    """
    seed_draws(*key, _COLLATE)
    try:
        return collate(samples)
    except Exception as error:
        named = ", ".join(map(str, indices[:8])) + (", ..." if len(indices) > 8 else "")
        raise TargetError(
            f"samples {named} cannot be collated into a batch",
            found=describe_error(error),
            try_="give the job a collate(items) function that pads or stacks them",
        ) from error


def _guarded(work: Callable[[], Portion]) -> Portion | Failed:
    """Return the portion; inside a data worker an error comes back as a record, for it to arrive unchanged."""
    if get_worker_info() is None:
        return work()
    try:
        return work()
    except ApportionError as error:
        return Failed(error=error, trace=traceback.format_exc())


def _assemble(request: Request, samples: dict[int, Any], collate: Collate, seed: int) -> Portion:
    key = (seed, request.epoch, request.index)
    micro_batches = []
    for piece in request.pieces:
        items = [samples[place] for place in piece.positions]
        indices = [request.samples[place] for place in piece.positions]
        batch = collate_samples(collate, items, indices, key=key)
        micro_batches.append(MicroBatch(batch=batch, start=piece.start, stop=piece.stop))
    return Portion(
        micro_batches=tuple(micro_batches), total=request.total, epoch=request.epoch, index=request.index
    )


class MapFetcher(Dataset[Any]):
    """The dataset that a DataLoader sees: its "index" is a Request, its "item" the Portion."""

    def __init__(self, dataset: MapStyle, collate: Collate, seed: int) -> None:
        self._dataset = dataset
        self._collate = collate
        self._seed = seed

    def __getitem__(self, request: Request) -> Portion | Failed:
        return _guarded(lambda: self._portion(request))

    def _portion(self, request: Request) -> Portion:
        with own_draws():
            samples = {
                place: fetch_sample(self._dataset, index, seed=self._seed, epoch=request.epoch)
                for place, index in request.samples.items()
            }
            return _assemble(request, samples, self._collate, self._seed)


class StreamFetcher(IterableDataset[Any]):
    """The stream that a DataLoader sees: portions of an iterable, one epoch from sample `position` on.

    Every rank and every data worker reads the whole stream and keeps its own part: worker w of n makes the
    global batches w, w + n, w + 2n, ... which the DataLoader hands out in turn.
    """

    def __init__(
        self, dataset: Iterable[Any], cut: Cut, collate: Collate, *, seed: int, epoch: int, position: int
    ) -> None:
        self._dataset = dataset
        self._cut = cut
        self._collate = collate
        self._seed = seed
        self._epoch = epoch
        self._position = position

    def __iter__(self) -> Iterator[Portion | Failed]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info is not None else (0, 1)
        source = _Source(self._dataset, seed=self._seed, epoch=self._epoch)
        turn = 0
        while True:
            made = _guarded(lambda: self._next_portion(source, mine=turn % num_workers == worker))  # noqa: B023
            if isinstance(made, Failed):
                yield made
                return
            if made.total == 0:
                return
            if made.micro_batches:
                yield made
            turn += 1

    def _next_portion(self, source: _Source, *, mine: bool) -> Portion:
        """Return the next portion, without micro-batches if another worker makes it; 0 samples at the end."""
        source.skip_to(self._position)
        first = source.index
        items = source.take(self._cut.batch_size)
        total = self._cut.usable(len(items)) if len(items) < self._cut.batch_size else len(items)
        pieces = self._cut.pieces(total) if mine and total else ()
        request = Request(
            epoch=self._epoch,
            index=first // self._cut.batch_size,
            total=total,
            pieces=pieces,
            samples={place: first + place for place in range(total)},
            whole=self._cut.whole,
        )
        with own_draws():
            return _assemble(request, dict(enumerate(items)), self._collate, self._seed)


class _Source:
    """A stream read sample by sample, each with its own draws."""

    def __init__(self, dataset: Iterable[Any], *, seed: int, epoch: int) -> None:
        self.index = 0
        self._dataset = dataset
        self._key = (seed, epoch)
        self._iterator: Iterator[Any] | None = None

    def skip_to(self, position: int) -> None:
        """Read and drop samples up to `position`.

        Raises: TargetError if the stream ends before.
        """
        while self.index < position:
            if not self.take(min(position - self.index, _SKIP_SAMPLES)):
                raise TargetError(
                    f"cannot resume at sample {position} of the dataset",
                    found=f"the stream ends after {self.index} samples",
                    try_="resume with the data that the checkpoint was made with",
                )

    def take(self, count: int) -> list[Any]:
        """Return the next `count` samples, fewer at the end of the stream."""
        items: list[Any] = []
        # A stream that divides itself among the workers would drop samples here, so it sees no worker.
        with own_draws(), hidden_worker_info():
            try:
                iterator = self._opened()
                for _ in range(count):
                    seed_draws(*self._key, self.index)
                    items.append(next(iterator))
                    self.index += 1
            except StopIteration:
                pass
            except Exception as error:
                raise TargetError(
                    f"sample {self.index} of the dataset cannot be read",
                    found=describe_error(error),
                    try_="iterate over data(split) alone up to that sample",
                ) from error
        return items

    def _opened(self) -> Iterator[Any]:
        if self._iterator is None:
            seed_draws(*self._key, 0, _STREAM)
            if isinstance(self._dataset, TellsEpoch):
                self._dataset.set_epoch(self._key[1])
            self._iterator = iter(self._dataset)
        return self._iterator


def read_samples(dataset: Iterable[Any], count: int) -> list[Any]:
    """Return the first `count` samples of a stream, fewer if it is shorter.

    Raises: TargetError that names the sample.
    """
    return _Source(dataset, seed=0, epoch=0).take(count)
