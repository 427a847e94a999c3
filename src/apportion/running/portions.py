"""What this rank takes of a global batch: micro-batches with their positions."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch

from ..batching import Dims, Part, flatten, map_tensors, num_samples, slice_batch
from .data import Portion
from .sampling import split_evenly


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One micro-batch on this rank's device, and the part of the global batch it stands for."""

    batch: Any
    part: Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """This rank's pieces of one global batch of `total` samples; `checksum` tells plain batches apart."""

    pieces: tuple[Piece, ...]
    total: int
    epoch: int = 0
    checksum: int = 0


def _to_device(batch: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return batch
    return map_tensors(lambda leaf: leaf.to(device, non_blocking=True), batch)


def rank_parts(total: int, num_ranks: int) -> tuple[Part, ...]:
    """Return the part of every rank, in rank order."""
    return tuple(Part(start=a, stop=b, total=total) for a, b in split_evenly(total, num_ranks))


def share_of_portion(portion: Portion, device: torch.device) -> Share:
    """Return the pieces of a loader's portion."""
    pieces = tuple(
        Piece(
            batch=_to_device(micro.batch, device),
            part=Part(start=micro.start, stop=micro.stop, total=portion.total),
        )
        for micro in portion.micro_batches
    )
    return Share(pieces=pieces, total=portion.total, epoch=portion.epoch)


def share_of_batch(
    batch: Any, dims: Dims, *, rank: int, num_ranks: int, num_micro_batches: int, device: torch.device
) -> Share:
    """Return this rank's pieces of a global batch that every rank holds as a whole.

    A rank or micro-batch without samples gets the first sample with weight 0.
    """
    total = num_samples(batch, dims)
    start, stop = split_evenly(total, num_ranks)[rank]
    pieces = []
    for a, b in split_evenly(stop - start, num_micro_batches):
        part = Part(start=start + a, stop=start + b, total=total)
        first, last = (part.start, part.stop) if part.num_samples else (0, 1)
        pieces.append(Piece(batch=_to_device(slice_batch(batch, dims, first, last), device), part=part))
    return Share(pieces=tuple(pieces), total=total, checksum=checksum(batch))


def checksum(batch: Any) -> int:
    """Return 20 bits that tell two batches apart: shapes, types, and the sum of every tensor."""
    words = []
    for leaf in flatten(batch)[0]:
        if isinstance(leaf, torch.Tensor):
            words.append(f"{tuple(leaf.shape)}{leaf.dtype}{float(leaf.detach().double().sum())!r}")
        elif isinstance(leaf, bool | int | float | str | type(None)):
            words.append(repr(leaf))
    return zlib.crc32("".join(words).encode()) & 0xFFFFF
