"""What pointwise operators, reductions, joins and factories return on meta tensors. See `shapes`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .forms import broadcast, empty, like


def unary(x: Tensor, *args: object, **kwargs: object) -> Any:
    return like(x) if x.is_floating_point() else NotImplemented


def _promoted(a: Any, b: Any, dtype: torch.dtype) -> Any:
    """Return the broadcast result of two operands, for the layouts where it is plain."""
    if not isinstance(b, Tensor):
        return like(a, dtype) if isinstance(a, Tensor) else NotImplemented
    if not isinstance(a, Tensor):
        return like(b, dtype)
    if a.shape == b.shape and a.stride() == b.stride():
        return like(a, dtype)
    size = broadcast(a.shape, b.shape)
    plain = size is not None and a.is_contiguous() and b.is_contiguous()
    return empty(size, dtype) if plain and size is not None else NotImplemented


def binary(a: Any, b: Any, *args: object, **kwargs: object) -> Any:
    dtype = torch.result_type(a, b)
    return _promoted(a, b, dtype) if dtype.is_floating_point else NotImplemented


def compare(a: Any, b: Any) -> Any:
    return _promoted(a, b, torch.bool)


def where(mask: Tensor, a: Tensor, b: Tensor) -> Any:
    size = broadcast(mask.shape, a.shape, b.shape)
    plain = mask.is_contiguous() and a.is_contiguous() and b.is_contiguous()
    return empty(size, a.dtype) if size is not None and plain and a.dtype == b.dtype else NotImplemented


def masked_fill(x: Tensor, mask: Tensor, value: object) -> Any:
    fits = x.is_contiguous() and broadcast(x.shape, mask.shape) == x.shape
    return empty(x.shape, x.dtype) if fits else NotImplemented


def in_place(x: Tensor, *args: object, **kwargs: object) -> Any:
    other = args[0] if args else None
    if isinstance(other, Tensor) and broadcast(x.shape, other.shape) != x.shape:
        return NotImplemented
    return x


def clone(x: Tensor, *, memory_format: torch.memory_format = torch.preserve_format) -> Any:
    if memory_format is torch.contiguous_format:
        return empty(x.shape, x.dtype)
    return like(x) if memory_format is torch.preserve_format else NotImplemented


def reduce(
    x: Tensor, dims: Sequence[int] | None = None, keep: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    if not x.is_floating_point() or dtype not in (None, x.dtype):
        return NotImplemented
    gone = {d % x.dim() for d in dims} if dims and x.dim() else set(range(x.dim()))
    size = [1 if i in gone else n for i, n in enumerate(x.shape) if keep or i not in gone]
    return empty(size, x.dtype) if x.is_contiguous() else NotImplemented


def reduce_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    return empty((), x.dtype) if x.is_floating_point() and dtype in (None, x.dtype) else NotImplemented


def _rows(x: Tensor) -> bool:
    """Return whether joining such tensors gives a row-major one (channels-last ones give channels-last)."""
    return x.is_contiguous() or (x.dim() > 1 and x.stride(-1) == 1 and x.stride(1) != 1)


def cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    first = tensors[0]
    if not all(_rows(t) and t.dim() == first.dim() and t.dtype == first.dtype for t in tensors):
        return NotImplemented
    axis = dim % max(first.dim(), 1)
    size = list(first.shape)
    size[axis] = sum(t.shape[axis] for t in tensors)
    fits = all(t.shape[:axis] == first.shape[:axis] for t in tensors)
    return empty(size, first.dtype) if fits else NotImplemented


def stack(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    first = tensors[0]
    if not all(_rows(t) and t.shape == first.shape and t.dtype == first.dtype for t in tensors):
        return NotImplemented
    size = list(first.shape)
    size.insert(dim % (first.dim() + 1), len(tensors))
    return empty(size, first.dtype)


def unsafe_view(x: Tensor, size: Sequence[int]) -> Any:
    return torch.ops.aten.view.default(x, size)


def unsafe_split(x: Tensor, size: int, dim: int = 0) -> Any:
    return torch.ops.aten.split.Tensor(x, size, dim)


def input_sizes(grad: Tensor, sizes: Sequence[int], *args: object) -> Any:
    return empty(sizes, grad.dtype)


def new_strided(x: Tensor, size: Sequence[int], stride: Sequence[int], **kwargs: Any) -> Any:
    return empty(size, kwargs.get("dtype") or x.dtype, stride)


def new(x: Tensor, size: Sequence[int], *args: object, **kwargs: Any) -> Any:
    return empty(size, kwargs.get("dtype") or x.dtype)


def filled_like(x: Tensor, *, memory_format: object = None, **kwargs: Any) -> Any:
    if memory_format not in (None, torch.preserve_format):
        return NotImplemented
    return like(x, kwargs.get("dtype"))


def factory(size: Sequence[int], *args: object, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    return empty(size, dtype or torch.get_default_dtype())


def scalar(value: object, *, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    return empty((), dtype or torch.get_default_dtype())


def arange(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
    start, end, step = (0, args[0], 1) if len(args) == 1 else (*args, 1)[:3]
    whole = all(isinstance(value, int) for value in (start, end, step))
    if not whole or step == 0 or (end - start) * step < 0:
        return NotImplemented
    return empty((math.ceil((end - start) / step),), dtype or torch.int64)
