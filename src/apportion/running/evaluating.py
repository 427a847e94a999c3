"""Validation: loss and metrics over every sample once, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from .engine import Engine
from .portions import Share

Metrics = Callable[[Any, Any], dict[str, Any]]


def evaluate(engine: Engine, shares: Iterable[Share], metrics: Metrics | None) -> dict[str, float]:
    """Return the sample-weighted means of the loss and of what `metrics(output, batch)` gives; collective.

    A metric is a per-sample mean, or (total, count), which are summed over everything before the division.
    The model is in evaluation mode meanwhile.
    """
    model = engine.applied.model
    training = {name: module.training for name, module in model.named_modules()}
    model.eval()
    totals: dict[str, list[float]] = {"loss": [0.0, 0.0]}
    try:
        with torch.no_grad():
            for share in shares:
                _add_share(engine, share, metrics, totals)
    finally:
        for name, module in model.named_modules():
            module.training = training[name]
        engine.applied.reshard()
    return _divide(totals, engine)


def _add_share(engine: Engine, share: Share, metrics: Metrics | None, totals: dict[str, list[float]]) -> None:
    value, outputs = engine.evaluate(share)
    totals["loss"][0] += value * share.total
    totals["loss"][1] += sum(piece.part.num_samples for piece in share.pieces)
    if metrics is None:
        return
    for piece, output in zip(share.pieces, outputs, strict=True):
        if not piece.part.num_samples:
            continue
        for name, made in metrics(output, piece.batch).items():
            total, count = made if isinstance(made, tuple) else (made, 1.0)
            weight = 1.0 if isinstance(made, tuple) else piece.part.num_samples
            entry = totals.setdefault(name, [0.0, 0.0])
            entry[0] += float(total) * weight
            entry[1] += float(count) * weight


def _divide(totals: dict[str, list[float]], engine: Engine) -> dict[str, float]:
    everyone: list[dict[str, list[float]]] = [totals]
    if engine.place.num_ranks > 1:
        everyone = [totals] * engine.place.num_ranks
        dist.all_gather_object(everyone, totals)
    sums: dict[str, list[float]] = {}
    for one in everyone:
        for name, (total, count) in one.items():
            entry = sums.setdefault(name, [0.0, 0.0])
            entry[0] += total
            entry[1] += count
    return {name: total / count if count else float("nan") for name, (total, count) in sums.items()}
