"""ZeRO stage 1: each rank keeps the optimizer state of its own parameters and sends out their new values.

Source: Rajbhandari et al. 2020, section 5.1. The user's own optimizer object does the step, on a subset of
its groups' parameters, so that any optimizer that treats parameters one by one works, with its settings.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from ..errors import PlanError


def assign_owners(parameters: Iterable[torch.Tensor], num_ranks: int) -> dict[int, int]:
    """Return the owner of each parameter by `id`, largest first to the rank with the least, in given order."""
    loads = [0] * num_ranks
    owners: dict[int, int] = {}
    for parameter in sorted(parameters, key=lambda p: -p.numel()):
        rank = loads.index(min(loads))
        owners[id(parameter)] = rank
        loads[rank] += parameter.numel()
    return owners


class PartitionedStep:
    """Steps the optimizer on the own parameters, then every owner broadcasts what it changed; collective."""

    def __init__(self, optimizer: Optimizer, group: dist.ProcessGroup | None) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise PlanError(
                "zero1 cannot split LBFGS: its step couples all parameters",
                try_="--strategy ddp, or another optimizer",
            )
        self.optimizer, self.group = optimizer, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.parameters = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        self.owners = assign_owners(self.parameters, self.size)
        for parameter in self.parameters:
            if self.owners[id(parameter)] != self.rank:
                self.optimizer.state.pop(parameter, None)

    def step(self) -> None:
        """Do one optimizer step on all ranks."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        used = [p for p in self.parameters if p.grad is not None]
        try:
            for group in groups:
                group["params"] = [p for p in group["params"] if self.owners.get(id(p)) == self.rank]
            self.optimizer.step()
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
        self._broadcast(used)

    def _broadcast(self, used: list[torch.Tensor]) -> None:
        works = []
        for owner in range(self.size):
            for dtype in dict.fromkeys(p.dtype for p in used):
                mine = [p for p in used if self.owners[id(p)] == owner and p.dtype == dtype]
                if mine:
                    flat = torch.cat([p.detach().reshape(-1) for p in mine])
                    source = dist.get_global_rank(self.group, owner) if self.group else owner
                    works.append(
                        (dist.broadcast(flat, source, group=self.group, async_op=True), flat, mine, owner)
                    )
        for work, flat, mine, owner in works:
            work.wait()
            if owner == self.rank:
                continue
            pieces = torch.split(flat, [p.numel() for p in mine])
            for parameter, piece in zip(mine, pieces, strict=True):
                parameter.detach().copy_(piece.view_as(parameter))
