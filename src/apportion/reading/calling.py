"""How a model and a loss are called with a batch, and what their functions accept."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ..errors import TargetError
from ..torch_private import compiled_original
from .parts import Batch
from .wording import describe_value

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def default_forward(model: nn.Module, batch: Batch) -> Any:
    """Return the model's output for a batch of any structure.

    A mapping gives the keyword arguments that `forward` accepts (all of them where it has `**kwargs`); a
    tuple or list as many leading elements as `forward` requires, at least one (all of them where it has
    `*args`); anything else is the only argument.

    Raises: TargetError if `forward` accepts none of a mapping's keys.
    """
    if isinstance(batch, Mapping):
        return model(**_accepted(model, batch))
    if isinstance(batch, list | tuple):
        return model(*batch[: _num_leading(model)])
    return model(batch)


def pair_forward(model: nn.Module, batch: Batch) -> Any:
    """Return the model's output for a batch that is `(args, kwargs)`."""
    args, kwargs = batch
    return model(*args, **kwargs)


def _accepted(model: nn.Module, batch: Mapping[Any, Any]) -> dict[str, Any]:
    parameters = _parameters(model)
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return dict(batch)
    names = {one.name for one in parameters if one.kind is not inspect.Parameter.VAR_POSITIONAL}
    chosen = {key: value for key, value in batch.items() if key in names}
    if not chosen:
        raise TargetError(
            "forward of the model takes none of the batch's keys",
            found=f"batch {describe_value(batch)}; forward takes {', '.join(sorted(names)) or 'nothing'}",
            try_="name the batch's keys as forward does, or define forward(model, batch) in the job file",
        )
    return chosen


def _num_leading(model: nn.Module) -> int | None:
    parameters = _parameters(model)
    if any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters):
        return None
    return max(1, sum(one.kind in _POSITIONAL and one.default is one.empty for one in parameters))


def _parameters(model: nn.Module) -> list[inspect.Parameter]:
    """Return the parameters of the user's `forward`, through what wraps it."""
    inner = _wrapped(model)
    while inner is not None:
        model, inner = inner, _wrapped(inner)
    return list(inspect.signature(model.forward).parameters.values())


def _wrapped(model: nn.Module) -> nn.Module | None:
    if isinstance(model, DistributedDataParallel | DataParallel):
        return cast(nn.Module, model.module)
    return compiled_original(model)


def accepts(function: Callable[..., Any], num_arguments: int) -> bool:
    """Say whether a function can be called with so many positional arguments."""
    target = function.forward if isinstance(function, nn.Module) else function
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # builtins tell nothing of their arguments
        return True
    try:
        signature.bind(*[None] * num_arguments)
    except TypeError:
        return False
    return True


def of_output_and_batch(function: Callable[..., Any], name: str) -> Callable[[Any, Batch], Any]:
    """Return `function(output, batch)`, also for one that takes the output alone.

    Raises: TargetError if it takes neither one nor two arguments.
    """
    if accepts(function, 2):
        return function
    if accepts(function, 1):
        return functools.partial(_of_output, function)
    raise TargetError(
        f"{name} should take (output, batch), or the output alone",
        found=f"{name}{_signature(function)}",
        try_=f"def {name}(output, batch): ...",
    )


def _of_output(function: Callable[..., Any], output: Any, batch: Batch) -> Any:
    return function(output)


def require_arguments(function: Callable[..., Any], name: str, arguments: str) -> None:
    """Check that a function of the job takes what it will be called with.

    Raises: TargetError if it does not.
    """
    if not accepts(function, len(arguments.split(", ")) if arguments else 0):
        raise TargetError(
            f"{name} should be callable as {name}({arguments})",
            found=f"{name}{_signature(function)}",
            try_=f"def {name}({arguments}): ...",
        )


def _signature(function: Callable[..., Any]) -> str:
    target = function.forward if isinstance(function, nn.Module) else function
    return str(inspect.signature(target))
