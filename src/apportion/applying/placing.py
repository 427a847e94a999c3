"""Naive model parallelism: layers placed on several devices of one process, one device working at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..batching import map_tensors, tensors
from ..errors import PlanError


def place(model: nn.Module, blocks: Sequence[str], devices: Sequence[torch.device]) -> list[Any]:
    """Spread the blocks over the devices by parameter bytes, in order; return the hook handles.

    Each placed block gets its inputs moved to its device and its output moved back, so that what the model
    does between blocks stays on the first device, which also keeps all that is in no block.
    Raises: PlanError if there are fewer blocks than devices.
    """
    modules = dict(model.named_modules())
    held = _movable(model, [name for name in blocks if name in modules])
    if len(held) < len(devices):
        raise PlanError(
            f"cannot place the model on {len(devices)} devices",
            found=f"{len(held)} blocks that can be placed apart",
            try_=f"{len(held)} devices or fewer, or another strategy",
        )
    model.to(devices[0])
    sizes = [sum(p.numel() * p.element_size() for p in modules[name].parameters()) + 1 for name in held]
    handles: list[Any] = []
    for name, index in zip(held, _balance(sizes, len(devices)), strict=True):
        modules[name].to(devices[index])
        handles += _bridge(modules[name], devices[index], devices[0])
    return handles


def _movable(model: nn.Module, blocks: list[str]) -> list[str]:
    """The blocks that share no parameter with the rest of the model."""
    uses: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = next((b for b in blocks if name == b or name.startswith(b + ".")), "")
        uses.setdefault(id(parameter), set()).add(block)
    modules = dict(model.named_modules())
    return [
        b
        for b in blocks
        if any(True for _ in modules[b].parameters())
        and all(uses[id(p)] == {b} for p in modules[b].parameters())
    ]


def _balance(sizes: list[int], num_devices: int) -> list[int]:
    """Return the device of each block: contiguous, near equal sums, none empty."""
    total, done = sum(sizes), 0
    places: list[int] = []
    for position, size in enumerate(sizes):
        wanted = int((done + size / 2) * num_devices / total)
        lowest = num_devices - (len(sizes) - position)
        highest = position if not places else places[-1] + 1
        places.append(max(lowest, min(wanted, highest, num_devices - 1), places[-1] if places else 0))
        done += size
    return places


def _bridge(module: nn.Module, inside: torch.device, outside: torch.device) -> list[Any]:
    def enter(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return map_tensors(lambda t: t.to(inside), args), map_tensors(lambda t: t.to(inside), kwargs)

    def leave(_module: nn.Module, _args: Any, output: Any) -> Any:
        return map_tensors(lambda t: t.to(outside), output) if tensors(output) else output

    return [
        module.register_forward_pre_hook(enter, with_kwargs=True),
        module.register_forward_hook(leave),
    ]
