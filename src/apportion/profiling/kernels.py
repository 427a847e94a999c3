"""Which kernels a device would run where a meta tensor cannot tell: fused attention, dropout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as functional
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..records import DeviceType

_IF_FINITE = {
    torch.isfinite: True,
    Tensor.isfinite: True,
    torch.isnan: False,
    Tensor.isnan: False,
    torch.isinf: False,
    Tensor.isinf: False,
}


class Kernels(TorchFunctionMode):
    """Calls the operators that the device's kernels save memory like.

    Attention is fused (nothing of tokens x tokens is kept) for 4-D inputs with as many heads, or grouped ones
    on request; on a CPU only without dropout and with values as wide as queries; never where the mask needs
    a gradient. Dropout on a GPU keeps one byte per element, on a CPU a scaled mask of the input's type.

    Values are taken to be finite, so that a forward that checks them goes its usual way.

    Source: `scaled_dot_product_attention` and `dropout` in ATen/native of torch 2.13.
    """

    def __init__(self, device_type: DeviceType) -> None:
        super().__init__()
        self.gpu = device_type is DeviceType.CUDA

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is functional.dropout and self.gpu:
            return _dropout(*args, **kwargs)
        if func in _IF_FINITE and args and args[0].is_meta:
            return torch.full((), _IF_FINITE[func], device="cpu").expand(args[0].shape)
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        heads = query.shape[-3:-2] == key.shape[-3:-2] == value.shape[-3:-2] or enable_gqa
        plain = query.is_meta and query.dim() == 4 and heads
        on_cpu = dropout_p == 0 and value.shape[-1] == query.shape[-1]
        if not plain or not (self.gpu or on_cpu) or (attn_mask is not None and attn_mask.requires_grad):
            return functional.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            attn_mask = attn_mask.to(query.dtype)
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        answer: Tensor = fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
        return answer


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0 or not input.is_meta:
        return functional.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, training)[0]
