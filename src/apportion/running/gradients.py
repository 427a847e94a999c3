"""Whole gradients, weights and states by the original names, whatever the layout; and their comparison."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..profiling.rounding import Gradients, noise_floor, relative_error, wide
from ..records import Worst


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the full tensor of a sharded one, on this device; collective where it is sharded."""
    if isinstance(tensor, DTensor):
        full: torch.Tensor = tensor.full_tensor()
        return full.detach()
    return tensor.detach()


def whole_gradients(model: nn.Module) -> Gradients:
    """Return every trainable parameter's full gradient by name; collective where sharded."""
    made: Gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            made[name] = None if parameter.grad is None else whole(parameter.grad).clone()
    return made


def tied_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the groups of parameter names that are one tensor."""
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return tuple(tuple(names) for names in groups.values() if len(names) > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The worst relative error of a set of tensors over all ranks, and how it looks.

    `spread` tells that ranks disagree among themselves; `ratio` is the common factor between the values and
    the truth where there is one (nan otherwise).
    """

    error: float
    worst: Worst
    spread: bool = False
    ratio: float = float("nan")


def compare(values: Gradients, truth: Gradients, *, floors: Mapping[str, float] | None = None) -> Compared:
    """Compare this rank's values with the truth, and take the worst of all ranks; collective."""
    floors = floors or {}
    names = list(dict.fromkeys([*truth, *values]))
    errors = {n: relative_error(values.get(n), truth.get(n), floors.get(n, 0.0)) for n in names}
    name = max(errors, key=errors.__getitem__, default="")
    mine = (errors.get(name, 0.0), name, _ratio(values, truth), _digest(values))
    everyone = _gather(mine)
    rank = max(range(len(everyone)), key=lambda r: everyone[r][0])
    first = everyone[0][3]
    spread = any(abs(other[3] - first) > 1e-4 * abs(first) for other in everyone)
    return Compared(
        error=everyone[rank][0],
        worst=Worst(name=everyone[rank][1], rank=rank),
        spread=spread,
        ratio=everyone[rank][2],
    )


_Finding = tuple[float, str, float, float]


def _gather(value: _Finding) -> list[_Finding]:
    if not dist.is_initialized():
        return [value]
    boxes: list[_Finding] = [value] * dist.get_world_size()
    dist.all_gather_object(boxes, value)
    return boxes


def _digest(values: Gradients) -> float:
    """Return one number that tells different sets of tensors apart: a sum weighted along the elements."""
    total = 0.0
    for tensor in values.values():
        if tensor is not None:
            flat = _flat(tensor)
            total += float(flat @ torch.linspace(1, 2, flat.numel(), dtype=torch.float64))
    return total


def _ratio(values: Gradients, truth: Gradients) -> float:
    """Return the factor c such that all values are c times the truth, or nan."""
    pairs = [(v, t) for n, t in truth.items() if t is not None and (v := values.get(n)) is not None]
    flat = [(_flat(v), _flat(t)) for v, t in pairs if v.shape == t.shape]
    if not flat:
        return float("nan")
    a, b = torch.cat([v for v, _ in flat]), torch.cat([t for _, t in flat])
    if not float(b.norm()):
        return float("nan")
    factor = float(a @ b / (b @ b))
    return factor if float((a - factor * b).norm()) <= 1e-4 * float(a.norm()) else float("nan")


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return wide(tensor).reshape(-1).cpu()


def gradient_errors(values: Gradients, truth: Gradients, tolerance: float) -> Compared:
    """Compare gradients; those that are only rounding are judged against the largest one's rounding unit."""
    return compare(values, truth, floors=noise_floor(truth, tolerance))


def named(items: Iterable[tuple[str, torch.Tensor]]) -> Gradients:
    """Return full copies of named tensors; collective where sharded."""
    return {name: whole(tensor).clone() for name, tensor in items}
