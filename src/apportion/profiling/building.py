"""Build a model without memory for its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_FILLS = frozenset(
    {"normal_", "uniform_", "trunc_normal_", "log_normal_", "exponential_", "bernoulli_", "random_"}
)


class NoFilling(TorchFunctionMode):
    """Leaves out the random filling of new weights: their values are not looked at, only their shapes."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name.endswith("_") and (name in _FILLS or getattr(func, "__module__", "") == nn.init.__name__):
            target = args[0] if args else kwargs.get("tensor")
            if isinstance(target, Tensor):
                return target
        return func(*args, **kwargs)


def build_without_weights(build: Callable[[], nn.Module]) -> nn.Module:
    """Return the model with its weights on the meta device.

    A model that looks at values while it is built (`.item()`) is built on the CPU instead, in memory that is
    reserved and never written.
    """
    try:
        with torch.device("meta"), NoFilling():
            return build()
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        with NoFilling():
            return build()
