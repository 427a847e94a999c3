"""Cut a global batch into parts along the batch dimension of each of its tensors."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from ..errors import TargetError
from .trees import flatten

Dims = tuple[int | None, ...]


def find_dims(batch: Any) -> Dims:
    """Return the batch dimension of each leaf of `batch`; None for leaves that are not split.

    Dimension 0 where all tensors agree on its size; otherwise the size that every tensor has somewhere.
    Raises: TargetError if no size is common to the tensors.
    """
    leaves, _ = flatten(batch)
    shaped = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > 0]
    if not shaped:
        raise TargetError("the batch holds no tensor with a batch dimension", try_="return tensors from data()")
    first = Counter(leaf.size(0) for leaf in shaped)
    if len(first) == 1:
        return tuple(0 if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 else None for leaf in leaves)
    common = set.intersection(*[set(leaf.shape) for leaf in shaped])
    if len(common) != 1:
        shapes = ", ".join(str(tuple(leaf.shape)) for leaf in shaped)
        raise TargetError(
            "cannot tell which dimension of the batch counts the samples",
            found=f"tensors of shapes {shapes}",
            try_="say so: batch_dims=(0, 1, ...) in Python, BATCH_DIMS in the file; None for what is not split",
        )
    size = common.pop()
    return tuple(
        list(leaf.shape).index(size) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 else None
        for leaf in leaves
    )


def num_samples(batch: Any, dims: Dims) -> int:
    """Return the number of samples of `batch`.

    Raises: TargetError if its tensors disagree.
    """
    leaves, _ = flatten(batch)
    if len(leaves) != len(dims):
        raise TargetError(
            "the batch has another structure than the example",
            found=f"{len(leaves)} leaves instead of {len(dims)}",
            try_="return the same structure for every batch",
        )
    sizes = {
        leaf.size(dim)
        for leaf, dim in zip(leaves, dims, strict=True)
        if dim is not None and isinstance(leaf, torch.Tensor)
    }
    if len(sizes) != 1:
        raise TargetError(
            "the tensors of a batch disagree on the number of samples",
            found=f"sizes {sorted(sizes)} along batch dimensions {dims}",
            try_="name the batch dimension of each input (BATCH_DIMS, or batch_dims= in Python)",
        )
    return int(sizes.pop())


def slice_batch(batch: Any, dims: Dims, start: int, stop: int) -> Any:
    """Return samples `start:stop` of `batch`."""
    leaves, rebuild = flatten(batch)
    cut = [
        leaf.narrow(dim, start, stop - start) if dim is not None and isinstance(leaf, torch.Tensor) else leaf
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    return rebuild(cut)


def spread_samples(batch: Any, dims: Dims, count: int) -> Any:
    """Return at most `count` samples of `batch`, spread evenly from the first to the last."""
    total = num_samples(batch, dims)
    if total <= count:
        return batch
    leaves, rebuild = flatten(batch)
    chosen = torch.linspace(0, total - 1, count).round().long()
    picked = [
        leaf.index_select(dim, chosen.to(leaf.device))
        if dim is not None and isinstance(leaf, torch.Tensor)
        else leaf
        for leaf, dim in zip(leaves, dims, strict=True)
    ]
    return rebuild(picked)
