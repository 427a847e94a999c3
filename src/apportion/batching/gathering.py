"""Gather the rows of outputs over the parts, with gradient for the own rows.

Every rank then takes the loss of the whole batch; the gradients of its own rows, summed over ranks, are those
of one device, without another exchange in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from ..errors import RefusedError
from .exchange import Part
from .trees import flatten


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Where the batch lies in one tensor: dimension and rows per sample; dim None = the same on every rank."""

    dim: int | None
    per_sample: int = 1


def find_rows(longer: Any, shorter: Any, num_longer: int, num_shorter: int) -> tuple[Rows, ...] | None:
    """Return the rows of each leaf, from the outputs for two batch sizes; None where they do not correspond."""
    leaves_a, leaves_b = flatten(longer)[0], flatten(shorter)[0]
    if len(leaves_a) != len(leaves_b):
        return None
    rows = []
    for a, b in zip(leaves_a, leaves_b, strict=True):
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.shape == b.shape:
            rows.append(Rows(dim=None))
            continue
        dims = [d for d, (p, q) in enumerate(zip(a.shape, b.shape, strict=False)) if p != q]
        if (
            a.dim() != b.dim()
            or len(dims) != 1
            or a.size(dims[0]) * num_shorter != b.size(dims[0]) * num_longer
        ):
            return None
        if a.size(dims[0]) % num_longer:
            return None
        rows.append(Rows(dim=dims[0], per_sample=a.size(dims[0]) // num_longer))
    return tuple(rows)


class RowGatherer:
    """Brings the rows of the other parts. `parts` are the parts of all ranks, in rank order."""

    def __init__(self, parts: tuple[Part, ...], own: int, group: dist.ProcessGroup | None) -> None:
        self.parts, self.own, self.group = parts, own, group

    def gather(self, leaf: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the whole batch's tensor; gradient flows into `leaf` only.

        Raises: RefusedError if the ranks' tensors differ in another dimension than the batch.
        """
        assert rows.dim is not None
        most = max(part.num_samples for part in self.parts) * rows.per_sample
        mine = leaf.detach().movedim(rows.dim, 0)
        self._check_shapes(mine)
        kept = mine[: self.parts[self.own].num_samples * rows.per_sample]
        padded = kept.new_zeros((most, *kept.shape[1:]))
        padded[: kept.size(0)] = kept
        boxes = [torch.empty_like(padded) for _ in self.parts]
        dist.all_gather(boxes, padded.contiguous(), group=self.group)
        pieces = [
            box[: part.num_samples * rows.per_sample] for box, part in zip(boxes, self.parts, strict=True)
        ]
        pieces[self.own] = leaf.movedim(rows.dim, 0)[: kept.size(0)]
        return torch.cat(pieces).movedim(0, rows.dim)

    def _check_shapes(self, mine: torch.Tensor) -> None:
        shape = torch.tensor(mine.shape[1:], dtype=torch.int64, device=mine.device)
        if not len(shape):
            return
        low, high = shape.clone(), shape.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group=self.group)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=self.group)
        if not torch.equal(low, high):
            raise RefusedError(
                "the ranks' outputs differ in shape, so that the loss of the whole batch cannot be taken",
                found=f"between {low.tolist()} and {high.tolist()} beside the batch dimension",
                try_="pad to one length in collate()",
            )


@dataclass(slots=True)
class WholeGatherer:
    """The probe's gatherer: the other parts' rows come from the recorded run of the whole batch."""

    whole: list[Any]
    part: Part
    position: int = 0

    def gather(self, leaf: torch.Tensor, rows: Rows) -> torch.Tensor:
        assert rows.dim is not None
        full = self.whole[self.position]
        self.position += 1
        start, stop = self.part.start * rows.per_sample, self.part.stop * rows.per_sample
        moved = full.detach().movedim(rows.dim, 0)
        return torch.cat([moved[:start], leaf.movedim(rows.dim, 0), moved[stop:]]).movedim(0, rows.dim)


class _ScaleGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0] * ctx.factor, None


def _scale_gradient(leaf: torch.Tensor, factor: float) -> torch.Tensor:
    if not leaf.requires_grad:
        return leaf
    scaled: torch.Tensor = _ScaleGradient.apply(leaf, factor)  # type: ignore[no-untyped-call]
    return scaled


class SharedParameters(TorchFunctionMode):
    """Parameters that a loss over the whole batch reads itself pass on `weight` of their gradient.

    (Every rank takes that loss, so that each rank's share of their gradient is its share of the samples.)
    """

    def __init__(self, parameters: Iterable[torch.Tensor], weight: float) -> None:
        super().__init__()
        self.known = {id(p): p for p in parameters if p.requires_grad}
        self.weight = weight

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in _LOOKS and torch.is_grad_enabled():
            args = tuple(self._shared(arg) for arg in args)
            kwargs = {key: self._shared(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)

    def _shared(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _scale_gradient(value, self.weight) if id(value) in self.known else value
        return type(value)(self._shared(item) for item in value) if type(value) in (list, tuple) else value


_LOOKS = frozenset({"__get__", "__set__", "__hash__", "apply"})  # what reads no value of a tensor


def gather_tree(value: Any, rows: tuple[Rows, ...], gatherer: Any, weight: float) -> Any:
    """Return the whole batch's `value`; leaves without a batch dimension pass on `weight` of their gradient.

    (They are the same on every rank, so that each rank's share of their gradient is its share of the samples.)
    """
    leaves, rebuild = flatten(value)
    made = []
    for leaf, row in zip(leaves, rows, strict=True):
        if not isinstance(leaf, torch.Tensor):
            made.append(leaf)
        elif row.dim is None:
            made.append(_scale_gradient(leaf, weight))
        else:
            made.append(gatherer.gather(leaf, row))
    return rebuild(made)
