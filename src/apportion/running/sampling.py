"""Which samples make up a global batch, and which of them a rank takes. Pure arithmetic over positions.

A global batch of N samples is split into contiguous slices, one per rank, as evenly as possible, and each
slice the same way into micro-batches. The number of micro-batches is fixed by the full batch, so that every
rank takes part in the same collectives also for a short last batch.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..errors import OptionError

_INT32_LIMIT = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One micro-batch: positions [start, stop) of the global batch, and the positions to load.

    A padding piece has start == stop and loads one real sample, whose weight is 0.
    """

    start: int
    stop: int
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one rank loads of one global batch.

    `samples` holds the dataset index of every position of the global batch that is loaded, by position.
    `whole` asks for the global batch itself instead of the pieces.
    """

    epoch: int
    index: int
    total: int
    pieces: tuple[Piece, ...]
    samples: dict[int, int]
    whole: bool


def split_evenly(total: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Return (start, stop) of `parts` contiguous ranges that cover `total`; the first ones hold one more.

    Raises: ValueError if there are no parts or a negative total.
    """
    if parts < 1 or total < 0:
        raise ValueError(f"cannot split {total} into {parts} parts")
    size, more = divmod(total, parts)
    bounds = [part * size + min(part, more) for part in range(parts + 1)]
    return tuple(itertools.pairwise(bounds))


def count_micro_batches(batch_size: int, num_ranks: int, micro_batch_size: int) -> int:
    """Return how many micro-batches the fullest rank needs for a full global batch.

    Raises: OptionError if the batch does not reach every rank, or a size is not positive.
    """
    if micro_batch_size < 1:
        raise OptionError(
            f"micro_batch_size is {micro_batch_size}", try_="a micro-batch holds at least 1 sample"
        )
    if batch_size < num_ranks:
        raise OptionError(
            f"the global batch of {batch_size} samples is smaller than the {num_ranks} ranks",
            try_=f"--batch-size {num_ranks} or more, or fewer devices",
        )
    per_rank = -(-batch_size // num_ranks)
    return -(-per_rank // micro_batch_size)


def cut_batch(total: int, *, rank: int, num_ranks: int, num_micro_batches: int) -> tuple[Piece, ...]:
    """Return the `num_micro_batches` micro-batches of one rank for a global batch of `total` samples."""
    start, stop = split_evenly(total, num_ranks)[rank]
    spare = start if start < stop else 0
    pieces = []
    for low, high in split_evenly(stop - start, num_micro_batches):
        positions = tuple(range(start + low, start + high)) or (spare,)
        pieces.append(Piece(start=start + low, stop=start + high, positions=positions))
    return tuple(pieces)


def draw_key(*words: int) -> int:
    """Return 64 well-mixed bits from integers, the same on every machine."""
    data = b"".join(word.to_bytes(16, "little", signed=True) for word in words)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def order_of_epoch(num_samples: int, *, seed: int, epoch: int) -> torch.Tensor:
    """Return the shuffled order of one epoch, shape (num_samples,); it knows nothing of ranks."""
    generator = torch.Generator().manual_seed(draw_key(seed, epoch))
    dtype = torch.int32 if num_samples < _INT32_LIMIT else torch.int64
    return torch.randperm(num_samples, generator=generator, dtype=dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How every global batch is cut for one rank."""

    batch_size: int
    rank: int
    num_ranks: int
    num_micro_batches: int
    whole: bool
    drop_last: bool

    def pieces(self, total: int) -> tuple[Piece, ...]:
        if self.whole:
            return (Piece(start=0, stop=total, positions=tuple(range(total))),)
        return cut_batch(
            total, rank=self.rank, num_ranks=self.num_ranks, num_micro_batches=self.num_micro_batches
        )

    def usable(self, num_samples: int) -> int:
        """Return how many samples of an epoch take part."""
        return num_samples - num_samples % self.batch_size if self.drop_last else num_samples


def epoch_requests(
    cut: Cut, order: torch.Tensor | Sequence[int], *, epoch: int, position: int
) -> Iterator[Request]:
    """Yield what a rank loads for each global batch of an epoch, from sample `position` on."""
    num_samples = cut.usable(len(order))
    for start in range(position, num_samples, cut.batch_size):
        total = min(cut.batch_size, num_samples - start)
        pieces = cut.pieces(total)
        wanted = {place for piece in pieces for place in piece.positions}
        yield Request(
            epoch=epoch,
            index=start // cut.batch_size,
            total=total,
            pieces=pieces,
            samples={place: int(order[start + place]) for place in sorted(wanted)},
            whole=cut.whole,
        )
