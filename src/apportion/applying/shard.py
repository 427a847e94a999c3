"""Sharded data parallelism with `fully_shard`, right for modules that it alone would break.

Note [Units]
A block becomes a unit of its own only if all its parameters are used inside its own forward, which runs
exactly once (the probe saw it). Everything else - tied weights, parameters read from outside, methods other
than forward, blocks that the data may skip - belongs to the root unit, which is whole while the step's
forward runs. 0-dim, sparse and mixed-type parameters stay replicated (see extras).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from ..records import Traits


def choose_units(model: nn.Module, blocks: Iterable[str], traits: Traits) -> tuple[str, ...]:
    """Return the blocks that can be units: used only inside their forward, and not skipped by the data."""
    if traits.conditional:
        return ()
    allowed = set(traits.forward_only)
    unused = set(traits.unused)
    modules = dict(model.named_modules())
    chosen: list[str] = []
    for name in blocks:
        module = modules.get(name)
        if module is None or name not in allowed or not any(True for _ in module.parameters()):
            continue
        names = {f"{name}.{p}" for p, _ in module.named_parameters()}
        if not names & unused and not any(_inside(name, other) for other in chosen):
            chosen.append(name)
    return tuple(chosen)


def _inside(name: str, outer: str) -> bool:
    return name.split(".")[: len(outer.split("."))] == outer.split(".")


def replicated_names(model: nn.Module, units: tuple[str, ...], traits: Traits) -> tuple[str, ...]:
    """Return what a sharded plan keeps whole: 0-dim and sparse parameters, and those of a unit's rarer type."""
    names = (
        {name for name, p in model.named_parameters() if p.dim() == 0}
        | set(traits.sparse)
        | sparse_tables(model)
    )
    groups: dict[str, dict[torch.dtype, list[str]]] = {}
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        if name not in names:
            unit = next((unit for unit in units if _inside(name, unit)), "")
            groups.setdefault(unit, {}).setdefault(p.dtype, []).append(name)
    for kinds in groups.values():
        most = max(kinds, key=lambda dtype: sum(sizes[name] for name in kinds[dtype]))
        names |= {name for dtype, held in kinds.items() if dtype != most for name in held}
    return tuple(name for name in sizes if name in names)


def sparse_tables(model: nn.Module) -> set[str]:
    """Return the weights of embeddings that make sparse gradients, used or not."""
    return {
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }


def shard(
    root: nn.Module,
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    units: tuple[str, ...],
    replicated: tuple[str, ...],
    reshard: bool,
) -> dict[int, nn.Parameter]:
    """Shard `root` (which holds `model`) over `mesh` in place; return the moved parameters by their old id.

    `reshard` frees the gathered parameters after forward (ZeRO stage 3); otherwise they stay until backward.
    """
    # The probe has left out units whose output is changed in place, which is what torch warns of here.
    warnings.filterwarnings(
        "ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning
    )
    before = dict(model.named_parameters())
    ignored = {before[name] for name in replicated}
    modules = dict(model.named_modules())
    for name in units:
        fully_shard(modules[name], mesh=mesh, reshard_after_forward=reshard, ignored_params=ignored)
    fully_shard(root, mesh=mesh, reshard_after_forward=False, ignored_params=ignored)
    after = dict(model.named_parameters())
    return {id(old): after[name] for name, old in before.items() if after[name] is not old}


def reached(objective: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> set[str]:
    """Return the names of the parameters that the backward of `objective` reaches."""
    names = {id(p): name for name, p in parameters.items()}
    found: set[str] = set()
    todo, seen = [objective.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in names:
            found.add(names[id(variable)])
        todo += [following for following, _ in node.next_functions]
    return found


def drop_unused(model: nn.Module, anchored: frozenset[str], used: set[str]) -> None:
    """Give back None as the gradient of anchored parameters that no rank used; collective."""
    held = {name: p for name, p in model.named_parameters() if name in anchored}
    device = next(iter(held.values())).device
    flags = torch.tensor([name in used for name in held], dtype=torch.float32, device=device)
    dist.all_reduce(flags)
    for parameter, flag in zip(held.values(), flags.tolist(), strict=True):
        if not flag:
            parameter.grad = None


class _Anchor(Function):
    """Passes the objective on, and a zero gradient to every parameter.

    Ranks on which the data left a parameter unused then take part in its reduction all the same.
    """

    @staticmethod
    def forward(ctx: Any, objective: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        return objective.view_as(objective)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = (torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.like)
        return grads[0], *zeros


def anchor(objective: torch.Tensor, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return `objective` such that its backward reaches every one of `parameters` that needs a gradient."""
    anchored: torch.Tensor = _Anchor.apply(objective, *[p for p in parameters if p.requires_grad])  # type: ignore[no-untyped-call]
    return anchored
