"""What the operators of layers and losses return on meta tensors. See `shapes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .forms import empty, like


def mm(a: Tensor, b: Tensor) -> Any:
    fits = a.dtype == b.dtype and a.dim() == b.dim() and a.shape[-1] == b.shape[-2]
    if not fits or a.shape[:-2] != b.shape[:-2]:
        return NotImplemented
    return empty((*a.shape[:-1], b.shape[-1]), a.dtype)


def addmm(bias: Tensor, a: Tensor, b: Tensor, **kwargs: object) -> Any:
    return mm(a, b) if bias.dtype == a.dtype else NotImplemented


def grouped_mm(a: Tensor, b: Tensor, offsets: Tensor | None = None, *args: object, **kwargs: object) -> Any:
    """One product per group; groups of rows (2-D by 3-D) or of the summed axis (2-D by 2-D)."""
    if a.dtype != b.dtype or a.shape[-1] != b.shape[-2] or offsets is None:
        return NotImplemented
    if a.dim() == 2 and b.dim() == 3:
        return empty((a.shape[0], b.shape[2]), a.dtype)
    if a.dim() == 2 and b.dim() == 2:
        return empty((offsets.shape[0], a.shape[0], b.shape[1]), a.dtype)
    return NotImplemented


def layer_norm(x: Tensor, shape: Sequence[int], *args: object) -> Any:
    if x.dtype not in (torch.float32, torch.float64) or not x.is_contiguous():
        return NotImplemented
    kept = x.dim() - len(shape)
    statistics = (*x.shape[:kept], *(1 for _ in shape))
    return empty(x.shape, x.dtype), empty(statistics, x.dtype), empty(statistics, x.dtype)


def layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: Sequence[bool],
) -> Any:
    if not x.is_contiguous():
        return NotImplemented
    wanted = (x, weight, bias)
    return tuple(
        None if source is None or not asked else empty(source.shape, source.dtype)
        for source, asked in zip(wanted, mask, strict=True)
    )


def batch_norm(x: Tensor, *args: object) -> Any:
    if x.dtype not in (torch.float32, torch.float64) or not x.is_contiguous():
        return NotImplemented
    channels = (x.shape[1],)
    return empty(x.shape, x.dtype), empty(channels, x.dtype), empty(channels, x.dtype)


def batch_norm_backward(grad: Tensor, x: Tensor, weight: Tensor | None, *args: Any) -> Any:
    if x.dtype not in (torch.float32, torch.float64) or not x.is_contiguous() or weight is None:
        return NotImplemented
    mask = args[-1]
    channels = empty((x.shape[1],), x.dtype)
    return (
        empty(x.shape, x.dtype) if mask[0] else None,
        channels if mask[1] else None,
        empty((x.shape[1],), x.dtype) if mask[2] else None,
    )


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: object,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    *args: object,
) -> Any:
    plain = x.is_contiguous() and weight.is_contiguous() and x.dim() == weight.dim()
    if transposed or not plain or x.dtype != weight.dtype:
        return NotImplemented
    spatial = [
        (length + 2 * p - d * (kernel - 1) - 1) // s + 1
        for length, kernel, s, p, d in zip(
            x.shape[2:],
            weight.shape[2:],
            _each(stride, x),
            _each(padding, x),
            _each(dilation, x),
            strict=True,
        )
    ]
    return empty((x.shape[0], weight.shape[0], *spatial), x.dtype) if min(spatial) > 0 else NotImplemented


def _each(values: Sequence[int], x: Tensor) -> Sequence[int]:
    return list(values) * (x.dim() - 2) if len(values) == 1 else values


def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, *args: Any
) -> Any:
    if not (grad.is_contiguous() and x.is_contiguous() and weight.is_contiguous()):
        return NotImplemented
    mask = args[-1]
    return (
        empty(x.shape, x.dtype) if mask[0] else None,
        empty(weight.shape, weight.dtype) if mask[1] else None,
        empty((grad.shape[1],), grad.dtype) if mask[2] else None,
    )


def embedding(weight: Tensor, index: Tensor, *args: object) -> Any:
    return empty((*index.shape, *weight.shape[1:]), weight.dtype)


def embedding_backward(grad: Tensor, index: Tensor, rows: int, *args: object) -> Any:
    return empty((rows, grad.shape[-1]), grad.dtype)


def softmax(x: Tensor, dim: int, *args: object) -> Any:
    if args and args[0] not in (False, None, x.dtype):
        return NotImplemented
    return empty(x.shape, x.dtype) if x.is_contiguous() and x.is_floating_point() else NotImplemented


def softmax_backward(grad: Tensor, out: Tensor, dim: int, dtype: torch.dtype) -> Any:
    plain = grad.is_contiguous() and out.is_contiguous() and grad.dtype == dtype
    return empty(grad.shape, dtype) if plain else NotImplemented


def like_both(grad: Tensor, x: Tensor, *args: object, **kwargs: object) -> Any:
    same = grad.shape == x.shape and grad.dtype == x.dtype
    return empty(x.shape, x.dtype) if same and grad.is_contiguous() and x.is_contiguous() else NotImplemented


def nll(x: Tensor, target: Tensor, weight: object, reduction: int, ignore: int) -> Any:
    shape = target.shape if reduction == 0 else ()
    return empty(shape, x.dtype), empty((), x.dtype)


def nll_backward(grad: Tensor, x: Tensor, *args: object) -> Any:
    return empty(x.shape, x.dtype) if x.is_contiguous() else NotImplemented


def dropout(x: Tensor, *args: object) -> Any:
    if not x.is_contiguous():
        return NotImplemented
    return empty(x.shape, x.dtype), empty(x.shape, torch.bool)


def dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Any:
    return like(grad)


def attention(query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> Any:
    """Fused attention: the result laid out like the query, and the log-sum-exp in float32 or wider."""
    batch, heads, tokens, width = query.shape
    if value.shape[-1] == width:
        out = like(query)
    else:
        out = empty((batch, tokens, heads, value.shape[-1]), query.dtype).transpose(1, 2)
    wide = query.dtype if query.dtype is torch.float64 else torch.float32
    return out, empty((batch, tokens, heads), wide).transpose(1, 2)


def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object
) -> Any:
    def swapped(x: Tensor) -> Tensor:
        batch, heads, tokens, width = x.shape
        return empty((batch, tokens, heads, width), x.dtype).transpose(1, 2)

    return swapped(query), swapped(key), swapped(value)


def ctc(scores: Tensor, target: Tensor, inputs: Any, targets: Any, *args: object) -> Any:
    """Losses (batch,) and the table (batch, time, 2 * longest target + 1); torch has no meta rule."""
    if isinstance(targets, Tensor):
        longest = int(targets.max()) if targets.device.type != "meta" else target.shape[-1]
    else:
        longest = max(targets)
    time, batch = scores.shape[0], scores.shape[1]
    return empty((batch,), scores.dtype), empty((batch, time, 2 * longest + 1), scores.dtype)


def ctc_backward(grad: Tensor, scores: Tensor, *args: object) -> Any:
    return empty(scores.shape, scores.dtype)
