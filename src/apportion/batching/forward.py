"""One forward pass over one part of the batch, from the user's functions to a loss that adds up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..records import LossKind
from .draws import DrawScope, DrawStream
from .exchange import Exchange, Part
from .losses import GatherPlan, LossFunction, PartLoss, part_loss
from .statistics import GlobalStatistics

Forward = Callable[[nn.Module, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Functions:
    """The user's forward and loss, the latter always with two arguments; `own_loss` = the model computes it."""

    forward: Forward
    loss: LossFunction
    own_loss: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRule:
    """What a part needs so that it counts exactly: found once by the probe, used by every step.

    `in_model`: the weighted losses are (also) inside the model's forward.
    """

    kind: LossKind
    in_model: bool = False
    norms: bool = False
    gather: GatherPlan | None = None


@dataclass(slots=True)
class PartRun:
    """One forward pass: the output, the loss of the part, and the weighted losses that were met."""

    output: Any
    loss: PartLoss
    weighted: list[torch.Tensor]


def run_output(
    model: nn.Module,
    batch: Any,
    part: Part,
    *,
    functions: Functions,
    rule: PartRule,
    exchange: Exchange,
    stream: DrawStream | None = None,
    scope: DrawScope | None = None,
) -> Any:
    """Return the output of `model` for `batch`, the samples of `part`; no loss is taken."""
    with ExitStack() as stack:
        if stream is not None and scope is not None:
            stack.enter_context(scope.drawing_from(stream))
        if rule.norms:
            stack.enter_context(GlobalStatistics(part, exchange, weighted=False))
        return functions.forward(model, batch)


def run_part(
    model: nn.Module,
    batch: Any,
    part: Part,
    *,
    functions: Functions,
    rule: PartRule,
    exchange: Exchange,
    stream: DrawStream | None = None,
    scope: DrawScope | None = None,
    gatherer: Any = None,
) -> PartRun:
    """Run forward and loss over `batch`, the samples of `part`.

    `stream` answers random operations and `scope` watches where they happen; `gatherer` brings the other
    parts' rows.
    """
    weighted = rule.kind is LossKind.WEIGHTED
    in_model = GlobalStatistics(part, exchange, weighted=weighted and rule.in_model)
    in_loss = GlobalStatistics(part, exchange, weighted=weighted)
    gather = (rule.gather, gatherer) if rule.kind is LossKind.GATHER else None
    with ExitStack() as stack:
        if stream is not None and scope is not None:
            stack.enter_context(scope.drawing_from(stream))
        with ExitStack() as inside:
            if rule.norms or in_model.weighted:
                inside.enter_context(in_model)
            output = functions.forward(model, batch)
        with ExitStack() as inside:
            if weighted:
                inside.enter_context(in_loss)
            loss = part_loss(
                rule.kind,
                part,
                output=output,
                batch=batch,
                loss=functions.loss,
                exchange=exchange,
                gather=gather,
                parameters=model.parameters() if gather is not None else (),
            )
    return PartRun(output=output, loss=loss, weighted=in_model.losses + in_loss.losses)
