"""Meta tensors of a given form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def contiguous_strides(size: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor of this size."""
    strides, step = [], 1
    for length in reversed(size):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def empty(size: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> Tensor:
    """Return a meta tensor, row-major unless strides are given."""
    return torch.empty_strided(
        tuple(size), tuple(stride or contiguous_strides(size)), dtype=dtype, device="meta"
    )


def like(x: Tensor, dtype: torch.dtype | None = None) -> Any:
    """Return a new dense tensor whose axes lie in memory in the order of those of `x`."""
    if x.is_contiguous():
        return empty(x.shape, dtype or x.dtype)
    if 0 in x.stride() or 0 in x.shape:
        return NotImplemented
    stride, step = [0] * x.dim(), 1
    for axis in sorted(range(x.dim() - 1, -1, -1), key=lambda i: (x.stride(i), x.shape[i] != 1)):
        stride[axis] = step
        step *= x.shape[axis]
    return empty(x.shape, dtype or x.dtype, stride)


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...] | None:
    """Return the broadcast shape, None where there is none (torch's own function imports sympy)."""
    rank = max(len(shape) for shape in shapes)
    out = [1] * rank
    for shape in shapes:
        for i, length in enumerate(shape, start=rank - len(shape)):
            if length != 1 and out[i] not in (1, length):
                return None
            out[i] = length if length != 1 else out[i]
    return tuple(out)
