"""What a collate function does to a batch: which dims hold the samples, and whether parts equal the whole.

Leaves are counted in pytree order. A list of strings that is as long as the batch counts as one leaf.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..errors import TargetError
from ..torch_private import tree_flatten
from .fetching import Collate, MapStyle, collate_samples, fetch_sample, own_draws, read_samples

_KEY = (0, 0, 0)  # any fixed one: every collate call of one comparison draws the same numbers
_COPIES = 3  # enough for n and n - 1 samples to be two real batches


def _plain(tree: Any) -> Any:
    """Return `tree` with mappings that are no dict as dicts and lists of strings as one leaf."""
    if isinstance(tree, Mapping):
        return {key: _plain(value) for key, value in tree.items()}
    if isinstance(tree, list) and tree and all(isinstance(item, str | bytes) for item in tree):
        return _Texts(tree)
    if isinstance(tree, list):
        return [_plain(item) for item in tree]
    if type(tree) is tuple:
        return tuple(_plain(item) for item in tree)
    return tree


class _Texts:
    """A list of strings, as one leaf."""

    def __init__(self, texts: list[str | bytes]) -> None:
        self.texts = texts


def _collated(collate: Collate, items: list[Any]) -> tuple[list[Any], Any]:
    batch = collate_samples(collate, items, list(range(len(items))), key=_KEY)
    return tree_flatten(_plain(batch))


def _shape(leaf: Any) -> tuple[int, ...]:
    if isinstance(leaf, _Texts):
        return (len(leaf.texts),)
    return tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else ()


def _dim_of(place: int, longer: tuple[int, ...], shorter: tuple[int, ...], n: int) -> int | None:
    """Return the dim that went from n to n - 1."""
    if len(longer) == len(shorter):
        changed = [dim for dim, sizes in enumerate(zip(longer, shorter, strict=True)) if len(set(sizes)) == 2]
        if not changed:
            return None
        if len(changed) == 1 and (longer[changed[0]], shorter[changed[0]]) == (n, n - 1):
            return changed[0]
    raise TargetError(
        f"leaf {place} of the collated batch has no axis for the samples",
        found=f"shape {longer} for {n} samples and {shorter} for {n - 1}",
        try_="let collate(items) put every sample at one place of one axis",
    )


def _dims(collate: Collate, item: Any) -> tuple[list[Any], tuple[int | None, ...]]:
    """Return the leaves and batch dims of a batch of copies of one sample, so that no padding differs."""
    n = _COPIES
    longer, form = _collated(collate, [item] * n)
    shorter, other = _collated(collate, [item] * (n - 1))
    if form != other:
        raise TargetError(
            "the structure of the collated batch depends on the number of samples",
            found=f"{len(longer)} leaves for {n} samples and {len(shorter)} for {n - 1}",
            try_="let collate(items) return tensors that hold one sample per row",
        )
    shapes = zip(map(_shape, longer), map(_shape, shorter), strict=True)
    return longer, tuple(_dim_of(place, *pair, n) for place, pair in enumerate(shapes))


def find_batch_dims(collate: Collate, items: list[Any]) -> tuple[int | None, ...]:
    """Return, for each leaf of a collated batch in pytree order, the dim that holds the samples.

    None stands for a leaf that is the same for any number of samples. Found by collating n and n - 1 copies of
    the first item, so that padding to the longest does not look like a batch.
    Raises: TargetError if a leaf grows with the samples in another way (packed, pairwise, a list of strings).
    """
    with own_draws():
        leaves, dims = _dims(collate, items[0])
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, _Texts):
            raise TargetError(
                f"leaf {place} of the collated batch is a list of strings, which cannot be split",
                try_="let collate(items) return tensors, or leave that field out",
            )
    return dims


def collate_depends_on_batch(dataset: MapStyle | Iterable[Any], collate: Collate, n: int) -> bool:
    """Return whether collating parts of a batch of `n` samples gives anything else than collating it whole.

    True for padding to the longest, for draws and statistics over the batch, where parts cannot be collated,
    and where it cannot be told without using the data up (an iterator). The samples are spread over a dataset
    with positions and are the first ones of a stream. The process's generators stay as they were.
    Raises: TargetError if a sample cannot be read or collated.
    """
    with own_draws():
        items = _sample(dataset, n)
        if items is None:
            return True
        if len(items) < 2:
            return False
        whole, form = _collated(collate, items)
        try:
            _, dims = _dims(collate, items[0])
            parts = [_collated(collate, [item]) for item in items]
        except TargetError:
            return True
    if any(other != form for _, other in parts):
        return True
    columns = zip(*(leaves for leaves, _ in parts), strict=True)
    return not all(_same(leaf, column, dim) for leaf, column, dim in zip(whole, columns, dims, strict=True))


def _sample(dataset: MapStyle | Iterable[Any], n: int) -> list[Any] | None:
    if isinstance(dataset, MapStyle) and not isinstance(dataset, torch.utils.data.IterableDataset):
        count = min(n, len(dataset))
        step = max(1, len(dataset) // max(1, count))
        indices = range(0, len(dataset), step)[:count]
        return [fetch_sample(dataset, index, seed=0, epoch=0) for index in indices]
    if not isinstance(dataset, Iterable) or iter(dataset) is dataset:
        return None
    return read_samples(dataset, n)


def _same(whole: Any, parts: tuple[Any, ...], dim: int | None) -> bool:
    if isinstance(whole, _Texts):
        return whole.texts == list(itertools.chain.from_iterable(part.texts for part in parts))
    if not isinstance(whole, torch.Tensor):
        return all(bool(whole == part) for part in parts)
    if dim is None:
        return all(_equal(whole, part) for part in parts)
    sizes = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
    return len(sizes) == 1 and _equal(whole, torch.cat(parts, dim))


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether shape, type and values are the same, NaN included."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))
