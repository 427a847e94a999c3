"""What a forward pass changes in a module beside gradients: buffers and plain attributes.

A step of several parts must leave what one forward over the whole batch would leave. Each part starts from
the same state; `combine` makes the one-device value from the parts' values by the buffer's rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..records import BufferRule

_OWN = frozenset(vars(nn.Module()))  # parameters, buffers, hooks: what every module has


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return every buffer by name, non-persistent ones included, shared ones once."""
    return dict(model.named_buffers())


def clone_buffers(buffers: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return copies of the named buffers."""
    return {name: buffers[name].detach().clone() for name in names}


def restore_buffers(buffers: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> None:
    """Write saved values back in place."""
    with torch.no_grad():
        for name, value in saved.items():
            buffers[name].copy_(value)


def _copy_plain(value: Any) -> Any:
    if isinstance(value, list | set):
        return value.copy()
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or a.shape != b.shape:
            return False
        return a.dtype == b.dtype and torch.allclose(a.detach(), b.detach(), rtol=1e-6, equal_nan=True)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, set | frozenset):
        return bool(a == b)
    if isinstance(a, bool | int | float | str | bytes | type(None)):
        return type(a) is type(b) and (a == b or (a != a and b != b))
    return a is b


@dataclass(slots=True)
class ModuleState:
    """Buffers and plain attributes of a model at one moment."""

    buffers: dict[str, torch.Tensor]
    attributes: dict[str, dict[str, tuple[Any, Any]]] = field(default_factory=dict)

    @classmethod
    def capture(cls, model: nn.Module) -> ModuleState:
        """Return the state of `model` now."""
        named = buffers_of(model)
        attributes = {
            name: {
                key: (value, _copy_plain(value))
                for key, value in vars(module).items()
                if key not in _OWN and not isinstance(value, nn.Module | Callable)
            }
            for name, module in model.named_modules()
        }
        return cls(clone_buffers(named, named), attributes)

    def restore(self, model: nn.Module) -> None:
        """Bring `model` back to this state; attributes that are the same by value are left alone."""
        restore_buffers(buffers_of(model), self.buffers)
        for name, module in model.named_modules():
            saved, present = self.attributes.get(name, {}), vars(module)
            for key in self._changed_keys(saved, present):
                if key not in saved:
                    del present[key]
                    continue
                original, copy = saved[key]
                if isinstance(original, list):
                    original[:] = copy
                elif isinstance(original, dict | set):
                    original.clear()
                    original.update(copy)
                elif isinstance(original, torch.Tensor) and original.is_leaf and not original.requires_grad:
                    original.copy_(copy)
                present[key] = original

    @staticmethod
    def _changed_keys(saved: Mapping[str, tuple[Any, Any]], present: Mapping[str, Any]) -> list[str]:
        new = [
            key
            for key, value in present.items()
            if key not in saved and key not in _OWN and not isinstance(value, nn.Module | Callable)
        ]
        return new + [
            key for key, (_, copy) in saved.items() if key in present and not _same(copy, present[key])
        ]

    def changed_attributes(self, model: nn.Module) -> dict[str, Any]:
        """Return `module.attribute` -> present value for attributes that differ from this state."""
        changed = {}
        for name, module in model.named_modules():
            present = vars(module)
            for key in self._changed_keys(self.attributes.get(name, {}), present):
                changed[f"{name}.{key}" if name else key] = _copy_plain(present[key])
        return changed


def equal_values(a: Any, b: Any) -> bool:
    """Return whether two attribute values are the same."""
    return _same(a, b)


def find_rule(
    start: torch.Tensor, whole: torch.Tensor, parts: list[torch.Tensor], weights: list[float], tolerance: float
) -> BufferRule | None:
    """Return the first rule that gives the whole batch's value from the parts' values, or None."""
    if all(_near(part, whole, tolerance) for part in parts):
        return BufferRule.SAME
    for rule in (BufferRule.MEAN, BufferRule.SUM, BufferRule.MAX, BufferRule.MIN):
        if rule is BufferRule.MEAN and not whole.is_floating_point():
            continue
        if whole.dtype == torch.bool and rule is BufferRule.SUM:
            continue
        if _near(_combined(rule, start, parts, weights), whole, tolerance):
            return rule
    return None


def _near(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    if not b.is_floating_point():
        return torch.equal(a.to(b.dtype), b)
    scale = max(float(b.double().norm()), 1e-12)
    return float((a.double() - b.double()).norm()) <= tolerance * scale


def _combined(
    rule: BufferRule, start: torch.Tensor, parts: list[torch.Tensor], weights: list[float]
) -> torch.Tensor:
    stacked = torch.stack(parts)
    if rule is BufferRule.MEAN:
        shaped = torch.tensor(weights, dtype=torch.float64).view(-1, *[1] * start.dim())
        return (stacked.double() * shaped).sum(0)
    if rule is BufferRule.SUM:
        return start + (stacked - start).sum(0)
    return stacked.amax(0) if rule is BufferRule.MAX else stacked.amin(0)
