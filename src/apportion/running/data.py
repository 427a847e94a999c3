"""Global batches for any number of ranks: every sample exactly once per epoch, in the same order.

    loader = Loader(dataset, LoaderSettings(batch_size=256, micro_batch_size=16, rank=rank, num_ranks=8))
    for portion in loader:
        ...

The position is counted in samples that the loop has been handed (not in what workers have read ahead), so a
loader resumes in the middle of an epoch, also with another number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, default_collate

from ..errors import OptionError, RankError, TargetError
from .collating import collate_depends_on_batch, find_batch_dims
from .fetching import Collate, Failed, MapFetcher, MapStyle, MicroBatch, Portion, StreamFetcher
from .sampling import Cut, Request, count_micro_batches, epoch_requests, order_of_epoch, split_evenly

__all__ = [
    "Loader",
    "LoaderSettings",
    "LoaderState",
    "MicroBatch",
    "Portion",
    "collate_depends_on_batch",
    "find_batch_dims",
    "split_evenly",
]

LoaderState: TypeAlias = Mapping[str, int | bool | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """How a loader makes batches.

    Units: samples; `batch_size` is the global batch, `micro_batch_size` one forward pass of one rank.
    `shuffle` None stands for what the dataset allows: yes with positions, no for a stream. `whole` gives every
    rank the plain global batch instead of its Portion. `multiprocessing_context` is that of the data workers
    (None = the platform's).
    """

    batch_size: int
    micro_batch_size: int
    rank: int = 0
    num_ranks: int = 1
    shuffle: bool | None = None
    seed: int = 0
    num_workers: int = 0
    whole: bool = False
    drop_last: bool = False
    pin_memory: bool = False
    multiprocessing_context: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank {self.rank} of {self.num_ranks} ranks")
        if self.num_workers < 0:
            raise OptionError(f"num_workers is {self.num_workers}", try_="0 or more data workers")


class Loader:
    """Iterates over the portions (or whole global batches) of the present epoch, from its position on.

    When an epoch is through, the next iteration is the next epoch. One iteration at a time.
    """

    def __init__(
        self, dataset: MapStyle | Iterable[Any], settings: LoaderSettings, *, collate: Collate | None = None
    ) -> None:
        self.settings = settings
        self._dataset = dataset
        self._collate: Collate = default_collate if collate is None else collate
        self._num_samples = _count_samples(dataset, settings)
        self._cut = Cut(
            batch_size=settings.batch_size,
            rank=settings.rank,
            num_ranks=settings.num_ranks,
            num_micro_batches=count_micro_batches(
                settings.batch_size, settings.num_ranks, settings.micro_batch_size
            ),
            whole=settings.whole,
            drop_last=settings.drop_last,
        )
        self._shuffle = self._num_samples is not None if settings.shuffle is None else settings.shuffle
        self._epoch = 0
        self._position = 0
        self._opened = False
        self._workers: DataLoader[Any] | None = None

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def position(self) -> int:
        """Samples of the present epoch that were handed out."""
        return self._position

    @property
    def num_samples(self) -> int | None:
        """Samples of the dataset; None for a stream."""
        return self._num_samples

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of every portion, on every rank."""
        return self._cut.num_micro_batches

    def __len__(self) -> int:
        """Return the global batches of a whole epoch.

        Raises: TypeError for a stream.
        """
        if self._num_samples is None:
            raise TypeError("a stream has no length")
        return -(-self._cut.usable(self._num_samples) // self._cut.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of `epoch`; the position stays where it is already the present one."""
        if epoch != self._epoch:
            self._epoch, self._position = epoch, 0

    def state_dict(self) -> LoaderState:
        """Return the position and what it refers to, for `load_state_dict`."""
        epoch, position = self._epoch, self._position
        if self._num_samples is not None and position >= self._cut.usable(self._num_samples):
            epoch, position = epoch + 1, 0
        return {
            "epoch": epoch,
            "position": position,
            "seed": self.settings.seed,
            "shuffle": self._shuffle,
            "num_samples": self._num_samples,
        }

    def load_state_dict(self, state: LoaderState) -> None:
        """Go on where `state` was taken, with any number of ranks.

        Raises: OptionError if seed, shuffling or dataset size differ: samples would be lost or repeated.
        """
        mine = self.state_dict()
        for name in ("seed", "shuffle", "num_samples"):
            if state[name] != mine[name]:
                raise OptionError(
                    f"the saved position in the data belongs to another {name}",
                    found=f"{name} was {state[name]}, is {mine[name]}",
                    try_="resume with the same data, seed and shuffling, or start a new run",
                )
        epoch, position = state["epoch"], state["position"]
        if epoch is None or position is None or epoch < 0 or position < 0:
            raise OptionError("not a position in the data", found=f"epoch {epoch}, sample {position}")
        self._epoch, self._position = int(epoch), int(position)

    def close(self) -> None:
        """End the data workers; the next iteration starts new ones."""
        self._workers = None

    def __iter__(self) -> Iterator[Any]:
        start = self._position
        for loaded in _mapped_errors(iter(self._open())):
            if isinstance(loaded, Failed):
                loaded.error.add_note(loaded.trace)
                raise loaded.error
            self._position += loaded.total
            yield loaded.micro_batches[0].batch if self._cut.whole else loaded
        if self._position == start == 0:
            raise _no_batches(self.settings)
        self._epoch, self._position = self._epoch + 1, 0

    def requests(self) -> Iterator[Request]:
        """Yield what this rank loads for each global batch of the present epoch, from its position on."""
        assert self._num_samples is not None
        order: torch.Tensor | Sequence[int] = range(self._num_samples)
        if self._shuffle:
            order = order_of_epoch(self._num_samples, seed=self.settings.seed, epoch=self._epoch)
        yield from epoch_requests(self._cut, order, epoch=self._epoch, position=self._position)

    def _open(self) -> DataLoader[Any]:
        dataset = self._dataset
        if self._num_samples is not None:
            assert isinstance(dataset, MapStyle)
            if self._workers is None:
                fetcher = MapFetcher(dataset, self._collate, self.settings.seed)
                self._workers = _torch_loader(fetcher, self.settings, sampler=_Requests(self))
            return self._workers
        assert isinstance(dataset, Iterable)
        if self._opened and iter(dataset) is dataset:
            raise TargetError(
                "the data can be read once only",
                found=f"data() returned an iterator ({type(dataset).__name__}) and a second pass is due",
                try_="return an object whose __iter__ starts afresh, or a dataset with __len__ and __getitem__",
            )
        self._opened = True
        stream = StreamFetcher(
            dataset,
            self._cut,
            self._collate,
            seed=self.settings.seed,
            epoch=self._epoch,
            position=self._position,
        )
        return _torch_loader(stream, self.settings, sampler=None)


class _Requests(Sampler[Request]):
    """What the torch DataLoader takes for its sampler."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Request]:
        return self._loader.requests()


def _unchanged(loaded: Any) -> Any:
    """Stand in for collate_fn: the fetchers collate themselves."""
    return loaded


def _torch_loader(
    fetcher: MapFetcher | StreamFetcher, settings: LoaderSettings, *, sampler: _Requests | None
) -> DataLoader[Any]:
    workers = settings.num_workers > 0
    return DataLoader(
        fetcher,
        batch_size=None,
        sampler=sampler,
        collate_fn=_unchanged,
        num_workers=settings.num_workers,
        pin_memory=settings.pin_memory and torch.accelerator.is_available(),
        # A stream's workers learn epoch and position when they start.
        persistent_workers=workers and sampler is not None,
        multiprocessing_context=settings.multiprocessing_context if workers else None,
        # Without one of its own it would draw from torch's default generator and so change the run.
        generator=torch.Generator().manual_seed(settings.seed),
    )


def _count_samples(dataset: MapStyle | Iterable[Any], settings: LoaderSettings) -> int | None:
    """Return the samples of a map-style dataset and None for a stream.

    Raises: TargetError for what is neither, or holds nothing; OptionError for what cannot be done with it.
    """
    if not isinstance(dataset, IterableDataset) and isinstance(dataset, MapStyle):
        count = len(dataset)
        if count == 0:
            raise TargetError("the dataset is empty", try_="data(split) must return at least one sample")
        if settings.drop_last and count < settings.batch_size:
            raise _no_batches(settings)
        return count
    if not isinstance(dataset, Iterable):
        raise TargetError(
            f"data() returned {type(dataset).__name__}, which is no dataset",
            found="neither __len__ with __getitem__ nor __iter__",
            try_="return a torch Dataset, a list of samples or an iterable",
        )
    if settings.shuffle:
        raise OptionError(
            "a stream cannot be shuffled",
            found=f"{type(dataset).__name__} is read in its own order",
            try_="shuffle=False, or a dataset with __len__ and __getitem__",
        )
    return None


def _no_batches(settings: LoaderSettings) -> TargetError:
    if settings.drop_last:
        return TargetError(
            f"the dataset has no full batch of {settings.batch_size} samples",
            try_="a smaller --batch-size, or keep the short last batch",
        )
    return TargetError("the dataset is empty", try_="data(split) must return at least one sample")


def _mapped_errors(source: Iterator[Any]) -> Iterator[Any]:
    """Yield from the torch DataLoader; what it raises itself means a data worker that is gone."""
    while True:
        try:
            loaded = next(source)
        except StopIteration:
            return
        except RuntimeError as error:
            raise RankError(
                "a data worker died",
                found=str(error),
                try_="num_workers=0 shows the cause; a bus error means too little shared memory",
            ) from error
        yield loaded
