"""What two modules must have in common to cost the same: classes, parameters, settings, the whole subtree."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

_Plain = bool | int | float | str | None


def fingerprints(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return one text per fqn (`modules` in pre-order) that is equal for modules built alike.

    It covers the class, parameters and buffers (shape, type, trainable), plain settings (numbers, strings,
    tuples of them) and the same of every child under its name. A whole number that only counts the position
    among siblings, such as a layer index, is left out.
    """
    positional = _positional(modules)
    children: dict[str, list[str]] = {name: [] for name in modules}
    found: dict[str, str] = {}
    for name in modules:
        if name:
            children[name.rpartition(".")[0]].append(name)
    for name in reversed(list(modules)):
        own = _describe(modules[name], positional.get(name, frozenset()))
        below = [f"{child.rpartition('.')[2]}={found[child]}" for child in children[name]]
        text = "|".join([own, *below])
        found[name] = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    return found


def combine(fingerprint: str, signature: str) -> str:
    """Return the fingerprint of a module together with the form of its inputs."""
    return hashlib.blake2b(f"{fingerprint}|{signature}".encode(), digest_size=6).hexdigest()


def _describe(module: nn.Module, positional: frozenset[str]) -> str:
    parts = [f"{type(module).__module__}.{type(module).__qualname__}"]
    for name, value in vars(module).items():
        if name.startswith("_") or name in positional or name == "forward":
            continue
        text = _setting(value)
        if text:
            parts.append(f"{name}:{text}")
    parts.extend(f"{name}:{_form(p)}{p.requires_grad}" for name, p in module.named_parameters(recurse=False))
    parts.extend(f"{name}:{_form(b)}" for name, b in module.named_buffers(recurse=False))
    return ";".join(parts)


def _form(tensor: Tensor) -> str:
    return f"{list(tensor.shape)}{tensor.dtype}"


def _setting(value: object) -> str:
    """Return the text of a plain setting; "" for objects, which the comparison cannot read."""
    if isinstance(value, _Plain | torch.dtype):
        return repr(value)
    if isinstance(value, list | tuple):
        return "(" + ",".join(_setting(item) for item in value) + ")"
    if isinstance(value, Tensor):
        return _form(value)
    return getattr(value, "__qualname__", "") if callable(value) else ""


def _positional(modules: Mapping[str, nn.Module]) -> dict[str, frozenset[str]]:
    """Return, by fqn, the names of whole numbers that grow by one with the position in their container."""
    found: dict[str, set[str]] = {}
    for name, module in modules.items():
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > 1:
            items = [f"{name}.{i}" if name else str(i) for i in range(len(module))]
            if all(item in modules for item in items):
                _compare_items(items, modules, found)
    return {name: frozenset(names) for name, names in found.items()}


def _compare_items(items: Sequence[str], modules: Mapping[str, nn.Module], found: dict[str, set[str]]) -> None:
    first, second = (dict(modules[item].named_modules()) for item in items[:2])
    for relative, module in first.items():
        other = second.get(relative)
        if other is None or type(other) is not type(module):
            continue
        for setting in _counting(vars(module), vars(other)):
            base = vars(module)[setting]
            for i, item in enumerate(items):
                fqn = f"{item}.{relative}" if relative else item
                if fqn in modules and vars(modules[fqn]).get(setting) == base + i:
                    found.setdefault(fqn, set()).add(setting)


def _counting(first: Mapping[str, object], second: Mapping[str, object]) -> list[str]:
    return [
        name
        for name, value in first.items()
        if type(value) is int and type(other := second.get(name)) is int and other == value + 1
    ]
