"""Take nested values apart into tensors and put them together again, plain dataclasses included.

torch's pytree leaves unregistered dataclasses whole; a user's loss must get the very same class back, so they
are opened here. What cannot be opened stays a leaf; `hidden_tensors` tells whether such a leaf holds tensors.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch

Rebuild = Callable[[list[Any]], Any]


def flatten(value: Any) -> tuple[list[Any], Rebuild]:
    """Return the leaves of `value` and a function that puts new leaves in their places."""
    leaves: list[Any] = []
    build = _walk(value, leaves)
    return leaves, lambda new: build(iter(new))


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return `value` with `function` applied to each tensor leaf."""
    leaves, rebuild = flatten(value)
    return rebuild([function(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves])


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensor leaves of `value` in order."""
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def hidden_tensors(value: Any) -> list[str]:
    """Return the class names of leaves that hold tensors which cannot be reached."""
    found = []
    for leaf in flatten(value)[0]:
        if isinstance(leaf, torch.Tensor | torch.nn.Module | type) or not hasattr(leaf, "__dict__"):
            continue
        if any(isinstance(item, torch.Tensor) for item in vars(leaf).values()):
            found.append(type(leaf).__name__)
    return found


def _walk(value: Any, leaves: list[Any]) -> Callable[[Any], Any]:
    if isinstance(value, Mapping):
        return _walk_mapping(value, leaves)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = [_walk(item, leaves) for item in value]
        cls: Any = type(value)
        return lambda source: cls(*[part(source) for part in parts])
    if isinstance(value, list | tuple):
        parts = [_walk(item, leaves) for item in value]
        kind: Any = type(value)
        return lambda source: kind([part(source) for part in parts])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _walk_dataclass(value, leaves)
    leaves.append(value)
    return lambda source: next(source)


def _walk_mapping(value: Mapping[Any, Any], leaves: list[Any]) -> Callable[[Any], Any]:
    keys = list(value)
    parts = [_walk(value[key], leaves) for key in keys]
    kind: Any = type(value)

    def build(source: Any) -> Any:
        items = [(key, part(source)) for key, part in zip(keys, parts, strict=True)]
        if kind in (dict, OrderedDict):
            return kind(items)
        if dataclasses.is_dataclass(kind):
            named: Any = kind
            return named(**dict(items))
        made = kind()
        made.update(items)
        return made

    return build


def _walk_dataclass(value: Any, leaves: list[Any]) -> Callable[[Any], Any]:
    fields = dataclasses.fields(value)
    parts = {field.name: _walk(getattr(value, field.name), leaves) for field in fields}
    kind: Any = type(value)

    def build(source: Any) -> Any:
        made = object.__new__(kind)
        for name, part in parts.items():
            object.__setattr__(made, name, part(source))
        return made

    return build
