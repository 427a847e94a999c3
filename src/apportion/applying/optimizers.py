"""Optimizers by name, and moving a user's optimizer onto the parameters that a strategy made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import SGD, Adafactor, AdamW, Optimizer

from ..errors import OptionError, RefusedError, TargetError
from ..torch_private import has_hooks_after_accumulation

_DEFAULT_LR = {"adamw": 1e-3, "adam": 1e-3, "sgd": 1e-2, "momentum": 1e-2, "adafactor": 1e-2}


def make_optimizer(name: str, params: Iterable[nn.Parameter], lr: float | None) -> Optimizer:
    """Return the optimizer that `--optimizer NAME` stands for.

    Raises: OptionError for an unknown name.
    """
    if name not in _DEFAULT_LR:
        raise OptionError(f"unknown optimizer '{name}'", try_=f"one of {', '.join(_DEFAULT_LR)}")
    rate = _DEFAULT_LR[name] if lr is None else lr
    if name == "adamw":
        return AdamW(params, lr=rate)
    if name == "adam":
        return torch.optim.Adam(params, lr=rate)
    if name == "adafactor":
        return Adafactor(params, lr=rate)
    return SGD(params, lr=rate, momentum=0.9 if name == "momentum" else 0.0)


def check_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise TargetError where the optimizer holds parameters that the model does not have."""
    known = {id(p) for p in model.parameters()}
    for index, group in enumerate(optimizer.param_groups):
        foreign = [p for p in group["params"] if id(p) not in known]
        if foreign:
            raise TargetError(
                "the optimizer holds parameters that the model does not have",
                found=f"{len(foreign)} in group {index}, the first of shape {tuple(foreign[0].shape)}",
                try_="make them part of the model (a loss with parameters can be a submodule)",
            )


def check_module(model: nn.Module) -> None:
    """Raise TargetError or RefusedError for a module that cannot be watched or has no parameters yet.

    Its parameters' hooks after accumulation (an optimizer inside backward) would see one rank's gradient.
    """
    lazy = [n for n, p in model.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        raise TargetError(
            f"parameter '{lazy[0]}' has no shape yet: the model is lazy",
            try_="run one batch through the model before the optimizer is made, in model()",
        )
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise RefusedError(
            "the model holds TorchScript modules, whose calls cannot be watched",
            try_="return the ordinary module; --compile makes it fast",
        )
    hooked = [n for n, p in model.named_parameters() if has_hooks_after_accumulation(p)]
    if hooked:
        raise RefusedError(
            f"parameter '{hooked[0]}' has a hook that runs when its gradient is accumulated",
            found="it would see the gradient of one rank's samples",
            try_="do its work in the optimizer, after the step's backward",
        )


def repoint(optimizer: Optimizer, moved: Mapping[int, nn.Parameter]) -> None:
    """Replace parameters in the groups, and move their state along; groups and settings stay.

    `moved` maps the `id` of an old parameter to the new one. State of the parameter's shape is sharded alike.
    """
    for group in optimizer.param_groups:
        old = group["params"]
        group["params"] = [moved.get(id(p), p) for p in old]
        for before, after in zip(old, group["params"], strict=True):
            if before is not after and before in optimizer.state:
                optimizer.state[after] = _move_state(optimizer.state.pop(before), before, after)


def _move_state(state: Mapping[str, Any], before: torch.Tensor, after: torch.Tensor) -> dict[str, Any]:
    moved: dict[str, Any] = {}
    for key, value in state.items():
        alike = isinstance(value, torch.Tensor) and value.shape == before.shape and value.dim() > 0
        if alike and isinstance(after, DTensor):
            moved[key] = distribute_tensor(value.to(after.device), after.device_mesh, after.placements)
        else:
            moved[key] = value
    return moved
