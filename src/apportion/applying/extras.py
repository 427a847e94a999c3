"""Gradients that the wrapper of a strategy leaves alone: sparse tables, 0-dim and mixed-type parameters.

Their objective is scaled for a mean over ranks like all others, so they are averaged here after backward.
A parameter that no rank used keeps no gradient, as on one device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn


def _padded_gather(values: torch.Tensor, counts: list[int], group: dist.ProcessGroup | None) -> torch.Tensor:
    most = max(counts)
    padded = values.new_zeros((most, *values.shape[1:]))
    padded[: values.size(0)] = values
    boxes = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(boxes, padded, group=group)
    return torch.cat([box[:count] for box, count in zip(boxes, counts, strict=True)])


def _mean_sparse(parameter: nn.Parameter, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Return the mean of the ranks' sparse gradients; indices (sparse_dim, nnz), values (nnz, ...)."""
    size = dist.get_world_size(group)
    grad = parameter.grad
    if grad is None:
        empty = torch.zeros((0,), dtype=torch.int64, device=parameter.device)
        indices, values = empty.view(0, 1), parameter.new_zeros((0, *parameter.shape[1:]))
    else:
        coalesced = grad.detach().coalesce()
        indices, values = coalesced.indices().t().contiguous(), coalesced.values()
    count = torch.tensor([indices.size(0)], device=parameter.device)
    boxes = [torch.empty_like(count) for _ in range(size)]
    dist.all_gather(boxes, count, group=group)
    counts = [int(box) for box in boxes]
    all_indices = _padded_gather(indices, counts, group).t()
    all_values = _padded_gather(values, counts, group) / size
    return torch.sparse_coo_tensor(all_indices, all_values, parameter.shape, check_invariants=True).coalesce()


def average_gradients(
    parameters: Mapping[str, nn.Parameter], sparse: frozenset[str], group: dist.ProcessGroup | None
) -> None:
    """Replace each gradient by its mean over ranks, in place; collective."""
    if not parameters:
        return
    device = next(iter(parameters.values())).device
    flags = torch.tensor([p.grad is not None for p in parameters.values()], dtype=torch.float32, device=device)
    dist.all_reduce(flags, group=group)
    for (name, parameter), used in zip(parameters.items(), flags.tolist(), strict=True):
        if not used:
            continue
        if name in sparse:
            parameter.grad = _mean_sparse(parameter, group)
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)
