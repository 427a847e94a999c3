"""Run a batch through a model and its loss, with errors that say which of the user's functions to mend."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import nn

from ..errors import ApportionError, TargetError
from .parts import Batch, JobParts
from .wording import describe_value, last_line

# Said wherever a loss cannot be used.
LOSS_FORMS: Final = (
    "return a mean over the samples of the batch, or (total, count): a sum and its weight, such as "
    "(F.cross_entropy(..., reduction='sum'), number_of_tokens)"
)


# A model up to this size is run on two samples within seconds, on any machine that can hold torch.
LARGEST_BYTES: Final = 2**30


def recheck(parts: JobParts) -> None:
    """Run two samples for real after a failure elsewhere, so that it is told which function is to be mended.

    Nothing is done for a model of more than 1 GiB of weights, or one that cannot be built without values.

    Raises: TargetError as `check_batch` and the functions of the job do.
    """
    try:
        with torch.device("meta"):
            model = parts.model()
    except Exception:  # what fails only here is no fault of the user's: a real build follows elsewhere
        return
    if sum(one.numel() * one.element_size() for one in model.parameters()) <= LARGEST_BYTES:
        check_batch(parts, parts.model(), parts.example(2))


def check_batch(parts: JobParts, module: nn.Module, batch: Batch) -> float:
    """Return the loss of one batch, taken without gradients, after checking all that can be wrong with it.

    The module's random state and buffers may change as by any forward.

    Raises: TargetError if the model rejects the batch, or the loss is not a finite scalar or
    `(total, count)`, or does not depend on the parameters.
    """
    output = run_forward(parts, module, batch)
    value = loss_value(parts, output, batch)
    total, count = value if isinstance(value, tuple) else (value, 1.0)
    trainable = any(parameter.requires_grad for parameter in module.parameters())
    if torch.is_grad_enabled() and trainable and not total.requires_grad:
        raise TargetError(
            "the loss does not depend on any trainable parameter",
            found=describe_value(total),
            try_="compute it from the output, without detach(), .item() or torch.no_grad()",
        )
    loss = float(total.detach()) / float(count)
    if not math.isfinite(loss):
        raise TargetError(
            f"the loss of the first batch is {loss}",
            found=f"batch {describe_value(batch)}; {_not_finite(module, output)}",
            try_="check the samples for nan or inf, and the loss for a division or a log of 0",
        )
    return loss


def run_forward(parts: JobParts, module: nn.Module, batch: Batch) -> Any:
    """Return the model's output.

    Raises: TargetError that shows the model's own error and the batch.
    """
    try:
        return parts.forward(module, batch)
    except ApportionError:
        raise
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a model may raise anything; it is told, with its place
        raise TargetError(
            "the model rejects a batch of its own data",
            found=f"{last_line(error)}; batch {describe_value(batch)}",
            try_="make data() and collate() give what forward takes, or define forward(model, batch)",
        ) from error


def loss_value(parts: JobParts, output: Any, batch: Batch) -> torch.Tensor | tuple[torch.Tensor, float]:
    """Return the loss as a scalar tensor, or as its total and count.

    Raises: TargetError if it is neither, or if the job has no loss and the model computes none.
    """
    if parts.loss is None:
        return _own_loss(output)
    try:
        value = parts.loss(output, batch)
    except ApportionError:
        raise
    except Exception as error:  # the user's loss may raise anything; it is told, with its place
        raise TargetError(
            "loss(output, batch) raised",
            found=f"{last_line(error)}; output {describe_value(output)}; batch {describe_value(batch)}",
            try_="check which part of the output and of the batch it reads",
        ) from error
    return as_loss(value)


def _own_loss(output: Any) -> torch.Tensor | tuple[torch.Tensor, float]:
    found = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if found is None:
        raise TargetError(
            "the job has no loss(), and the model's output carries none",
            found=f"output {describe_value(output)}",
            try_="define loss(output, batch) in the job file; or give the model its labels, if it has a loss",
        )
    return as_loss(found)


def as_loss(value: Any) -> torch.Tensor | tuple[torch.Tensor, float]:
    """Return what a loss function returned, checked to be a scalar tensor or `(total, count)`.

    Raises: TargetError otherwise, saying how to return one.
    """
    if isinstance(value, tuple | list) and len(value) == 2 and _is_scalar(value[0]):
        count = _as_number(value[1])
        if count is not None:
            return value[0], _checked_count(count)
    if not _is_scalar(value):
        raise TargetError(
            "the loss is not a scalar tensor", found=f"loss() returned {describe_value(value)}", try_=LOSS_FORMS
        )
    scalar: torch.Tensor = value
    return scalar


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point()


def _as_number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value.detach()) if value.ndim == 0 else None
    return float(value) if isinstance(value, int | float) else None


def _checked_count(count: float) -> float:
    if count > 0 and math.isfinite(count):
        return count
    raise TargetError(
        "the count of (total, count) is not positive",
        found=f"{count:g}",
        try_="give the number of samples or tokens that the total adds up",
    )


def _not_finite(module: nn.Module, output: Any) -> str:
    """Say where numbers stop being finite: in the weights or in the output."""
    for name, parameter in module.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"parameter {name} is not finite"
    if isinstance(output, torch.Tensor) and not bool(output.isfinite().all()):
        return "the output is not finite, the weights are"
    return "the weights are finite"
