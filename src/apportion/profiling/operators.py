"""Watch every operator of a forward and backward: FLOPs, memory traffic, and what lives after the model."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ..torch_private import LightDispatchMode, tree_map
from .forms import empty
from .shapes import infer

if TYPE_CHECKING:
    from .trace import Trace

KNOWN_ELEMENTS = 2**24
"""Elements of the largest constant that stays real: 64 MiB of float32, far below what a model needs."""

_KNOWN = frozenset({"ones", "zeros", "full", "arange", "linspace", "eye", "scalar_tensor", "_to_copy"})
_LOOKUPS = frozenset({"embedding", "index_select", "gather", "index"})
_MOVES = frozenset({"aten::clone", "aten::copy_", "aten::_to_copy", "aten::detach", "aten::lift_fresh"})


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, field.name))


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes that reading `tensor` once moves; an expanded tensor counts what it stores,
    a sparse one nothing.
    """
    if tensor.layout is not torch.strided:
        return 0
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """Return the storage, or None for a layout that has no single one (sparse)."""
    return tensor.untyped_storage() if tensor.layout is torch.strided else None


def _attention_flops(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return the FLOPs of the two products of attention; causal attention counts in full."""
    batch, heads, tokens, width = query.shape
    return 2 * batch * heads * tokens * key.shape[-2] * (width + value.shape[-1])


def _attention_backward_flops(query: Tensor, key: Tensor, value: Tensor) -> int:
    """Return the FLOPs of the four products of attention's backward; recomputed scores do not count."""
    return 2 * _attention_flops(query, key, value)


def _grouped_flops(a: Tensor, b: Tensor) -> int:
    """Return the FLOPs of one product per group; each row of a 2-D left operand belongs to one group."""
    if a.dim() == 2 and b.dim() == 3:
        return 2 * a.shape[0] * a.shape[1] * b.shape[2]
    if a.dim() == 3 and b.dim() == 2:
        return 2 * a.shape[1] * a.shape[2] * b.shape[1]
    groups = a.shape[0] if a.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _convolution_backward_flops(grad: Tensor, x: Tensor, weight: Tensor, *args: Any) -> int:
    """Return the FLOPs of a convolution's backward: those of its forward for each gradient asked for.

    Torch's counter takes a grouped convolution for a full one here.
    """
    transposed, mask = args[4], args[-1]
    positions = math.prod((x if transposed else grad).shape[2:])
    forward = 2 * x.shape[0] * positions * weight.numel()
    return forward * (int(mask[0]) + int(mask[1]))


def matmul_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    """Return the FLOPs of a matmul-like operator (two per multiply-add), 0 for any other.

    Source: the formulas of `torch.utils.flop_counter`; attention on CPU and grouped products, which have
            none there, by the same counting.
    """
    name = func.overloadpacket.__name__
    if name == "convolution_backward":
        return _convolution_backward_flops(*args)
    formula = flop_registry.get(func.overloadpacket)
    if formula is not None:
        return int(formula(*args, **kwargs, out_val=out))
    if name == "_scaled_dot_product_flash_attention_for_cpu":
        return _attention_flops(*args[:3])
    if name == "_scaled_dot_product_flash_attention_for_cpu_backward":
        return _attention_backward_flops(*args[1:4])
    return _grouped_flops(*args[:2]) if name == "_grouped_mm" else 0


class Window:
    """The storages made since the model's last layer: logits and what the loss adds to them.

    `base` is the size of that layer's output; `peak` the most that lived at once beside it. `start` is the
    sequence number from which autograd nodes belong to it.
    """

    def __init__(self, *, start: int, held: Sequence[Tensor] = ()) -> None:
        self.start = start
        self.held = [t.untyped_storage() for t in held if t.layout is torch.strided]
        self.base = sum(storage.nbytes() for storage in {id(s): s for s in self.held}.values())
        self.born: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.saved: list[tuple[int, int]] = []
        self.live = 0
        self.peak = 0
        self.closed = False

    def add(self, storage: torch.UntypedStorage) -> None:
        """Count a new storage until it is freed."""
        key, size = id(storage), storage.nbytes()
        if key in self.born or self.closed:
            return

        def gone(_: object) -> None:
            self.born.pop(key, None)
            self.live -= size

        self.born[key] = weakref.ref(storage, gone)
        self.live += size
        self.peak = max(self.peak, self.live)


class Operators(LightDispatchMode):  # type: ignore[no-untyped-call]
    """Reports each operator to the trace; on meta tensors it answers by the light rules first."""

    def __init__(self, trace: Trace, *, on_meta: bool, keep_values: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace
        self.on_meta = on_meta
        self.keep_values = keep_values

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.on_meta:
            if self.keep_values and _keeps_values(func, args, kwargs):
                kwargs = kwargs | {"device": torch.device("cpu")}
            args, kwargs, out = _without_values(func, args, kwargs)
        else:
            out = func(*args, **kwargs)
        if not self.trace.paused:
            self.trace.operator(func, args, kwargs, out)
        return out


def _keeps_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator would move known values to the meta device only to lose them.

    A forward that makes a mask "where the hidden states are" means the device, not the absence of values.
    Floating zeros are initial states: some kernels want those on the device of the input.
    """
    name = func.overloadpacket.__name__
    if str(kwargs.get("device")) != "meta" or name not in _KNOWN:
        return False
    if name == "_to_copy":
        return not args[0].is_meta and args[0].numel() <= KNOWN_ELEMENTS
    dtype = kwargs.get("dtype")
    if name in ("zeros", "full") and (dtype is None or dtype.is_floating_point or dtype.is_complex):
        return False
    size = args[0] if args and isinstance(args[0], list | tuple) else (max(args, default=1),)
    return math.prod(size) <= KNOWN_ELEMENTS


def _without_values(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Run an operator where weights are meta tensors and data may be real: mixed operands become meta."""
    inputs = list(tensors_in((args, kwargs)))
    device = str(kwargs.get("device") or "meta")
    if not any(tensor.is_meta for tensor in inputs) and (inputs or "device" not in kwargs or device != "meta"):
        return args, kwargs, func(*args, **kwargs)
    out: Any = NotImplemented
    if func.namespace == "aten" and device == "meta":
        out = infer(func.__name__.removesuffix(".default"), args, kwargs)
    if out is NotImplemented:
        if not all(tensor.is_meta for tensor in inputs):
            args, kwargs = tree_map(as_meta, (args, kwargs))
        out = func(*args, **kwargs)
    return args, kwargs, out


def as_meta(value: Any) -> Any:
    """Return a meta tensor of the same form for a tensor elsewhere; anything else as it is."""
    if not isinstance(value, Tensor) or value.is_meta:
        return value
    if value.layout is not torch.strided:
        return value.to("meta")
    return empty(value.shape, value.dtype, value.stride())


def is_move(func: Any) -> bool:
    """Return whether the operator only makes, moves or views memory (no arithmetic)."""
    return func.is_view or func.name().partition(".")[0] in _MOVES


def traffic_bytes(func: Any, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    """Return the bytes that an operator reads and writes; a lookup reads only what it returns."""
    written = sum(tensor_bytes(tensor) for tensor in results)
    if func.overloadpacket.__name__ in _LOOKUPS:
        return 2 * written + sum(tensor_bytes(tensor) for tensor in inputs[1:])
    return written + sum(tensor_bytes(tensor) for tensor in inputs)
