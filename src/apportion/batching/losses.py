"""The loss of one part, such that parts add up to the loss of the whole batch (see LossKind)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import RefusedError, TargetError
from ..records import LossKind
from .exchange import Exchange, Part
from .gathering import Rows, SharedParameters, gather_tree

LossFunction = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLoss:
    """`objective` is what backward starts from; `value` (no gradient) what adds up to the global loss."""

    objective: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherPlan:
    """Rows of the outputs, and of the batch leaves that the loss reads (Rows(dim=None) = not gathered)."""

    output: tuple[Rows, ...]
    batch: tuple[Rows, ...]


def loss_function(loss: Callable[..., Any] | None) -> LossFunction:
    """Return `loss(output, batch)` for a user's loss of one or two arguments, or for a model's own loss."""
    if loss is None:
        return _model_loss
    try:
        parameters = list(inspect.signature(loss).parameters.values())
    except (TypeError, ValueError):
        return loss
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in positional if p.default is p.empty]
    takes_two = len(positional) >= 2 and (len(required) != 1 or positional[1].name == "batch")
    if takes_two or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return loss
    return lambda output, batch: loss(output)


def _model_loss(output: Any, batch: Any) -> Any:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is None:
        raise TargetError(
            "there is no loss",
            found=f"the model returns {type(output).__name__} without a 'loss', and no loss function was given",
            try_="define loss(output, batch), or pass labels so that the model computes its own",
        )
    return loss


def check_scalar(value: Any) -> torch.Tensor:
    """Return `value` if it is a scalar tensor.

    Raises: TargetError otherwise.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.reshape(())
    found = (
        f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    )
    raise TargetError(
        "loss() must return one number",
        found=found,
        try_="return a mean over the samples, or (total, count): a sum and what it is to be divided by",
    )


def is_total_and_count(value: Any) -> bool:
    """Return whether a loss has the form (total, count)."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], torch.Tensor)


def part_loss(
    kind: LossKind,
    part: Part,
    *,
    output: Any,
    batch: Any,
    loss: LossFunction,
    exchange: Exchange,
    gather: Any = None,
    parameters: Iterable[torch.Tensor] = (),
) -> PartLoss:
    """Return the loss of one part. `gather` is (GatherPlan, gatherer) for LossKind.GATHER.

    `parameters` are those that the loss may read itself.
    """
    if kind is LossKind.GATHER:
        plan, gatherer = gather
        whole_output = gather_tree(output, plan.output, gatherer, part.weight)
        whole_batch = gather_tree(batch, plan.batch, gatherer, part.weight)
        with SharedParameters(parameters, part.weight):
            whole = check_scalar(loss(whole_output, whole_batch))
        return PartLoss(objective=whole, value=whole.detach() * part.weight)
    made = loss(output, batch)
    if kind is LossKind.TOTAL_COUNT:
        return _total_and_count(made, part, exchange)
    scaled = check_scalar(made) * part.weight
    return PartLoss(objective=scaled, value=scaled.detach())


def _total_and_count(made: Any, part: Part, exchange: Exchange) -> PartLoss:
    if not is_total_and_count(made):
        raise TargetError(
            "loss() returned (total, count) for the example but not now", found=type(made).__name__
        )
    total = check_scalar(made[0])
    count = torch.as_tensor(made[1], device=total.device).detach().to(torch.float64).reshape(())
    if isinstance(made[1], torch.Tensor) and made[1].requires_grad:
        raise RefusedError(
            "the count of loss() depends on the parameters",
            try_="return a count of samples, tokens or weights of the batch",
        )
    live = 1.0 if part.num_samples else 0.0
    counts = exchange.sum(count * live)
    scaled = total * (live / counts).to(total.dtype)
    return PartLoss(objective=scaled, value=scaled.detach())
