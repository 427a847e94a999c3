"""The global gradient norm over whatever layout the gradients have, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from ..torch_private import multiply_all


def _local(grad: torch.Tensor) -> torch.Tensor:
    if isinstance(grad, DTensor):
        return grad.to_local()
    return grad.coalesce().values() if grad.is_sparse else grad


def global_norm(gradients: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the 2-norm of all gradients as if they were on one device; collective where they are sharded.

    Sharded and replicated gradients are normed apart: each replicated one counts once.
    """
    held = list(gradients)
    sharded = [g for g in held if isinstance(g, DTensor)]
    plain = [g for g in held if not isinstance(g, DTensor)]
    square = torch.zeros((), dtype=torch.float32, device=device)
    if plain:
        square = get_total_norm([_local(g) for g in plain]).float().square()
    if sharded:
        norm = get_total_norm(sharded)
        square = square + (norm.full_tensor() if isinstance(norm, DTensor) else norm).float().square()
    return square.sqrt()


def scale_gradients(gradients: Iterable[torch.Tensor], factor: float) -> None:
    """Multiply every gradient by `factor` in place."""
    if factor == 1.0:
        return
    locals_ = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    dense = [g for g in locals_ if not g.is_sparse and g.numel()]
    if dense:
        multiply_all(dense, factor)
    for g in locals_:
        if g.is_sparse:
            g.mul_(factor)


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor of global-norm clipping (Pascanu et al. 2013; torch adds 1e-6 to the norm)."""
    return min(1.0, limit / (norm + 1e-6))
