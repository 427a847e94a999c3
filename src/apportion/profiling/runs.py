"""The forward passes of the probe: watched ones, the one-device truth, and those of parts."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..batching import (
    Dims,
    DrawLog,
    DrawMode,
    DrawScope,
    DrawStream,
    LocalExchange,
    ModuleState,
    Part,
    buffers_of,
    find_sites,
    flatten,
    is_total_and_count,
    num_samples,
    seeded_python,
    slice_batch,
    spread_samples,
    tensors,
)
from ..batching.forward import Functions, PartRule, PartRun, run_part
from ..batching.statistics import GlobalStatistics
from ..errors import TargetError
from ..records import LossKind
from .findings import Truth
from .rounding import Gradients, cancelled_size, dense, moved_floor, noise_floor, tolerance_of, wide
from .watching import watch_uses


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """What the two forward passes without gradients showed."""

    output: Any
    shorter: Any
    sites: dict[tuple[str, int], int | None]
    drawing: tuple[str, ...]
    forward_only: tuple[str, ...]
    norms: bool
    counts: bool
    in_model: bool
    selects: bool
    totals: bool
    drew: bool
    from_python: bool
    branches: bool
    masks: bool
    loss_inside: bool
    whole_only: str = ""


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def gradients_of(objective: torch.Tensor, model: nn.Module) -> Gradients:
    """Return the gradients of the trainable parameters by name; those that were there are put back."""
    parameters = _trainable(model)
    if not objective.requires_grad:
        raise TargetError(
            "the loss does not depend on any trainable parameter",
            try_="check requires_grad and that loss() does not detach the output",
        )
    held = {name: p.grad for name, p in parameters.items()}
    try:
        for p in parameters.values():
            p.grad = None
        torch.autograd.backward(objective)
        return {name: p.grad for name, p in parameters.items()}
    finally:
        for name, p in parameters.items():
            p.grad = held[name]


def first_line(error: Exception) -> str:
    """Return the class and the first line of an error."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


# What user code raises on a batch that it cannot take.
REJECTED = (
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)


class Runs:
    """Runs one model over one small batch, always from the same state; `close` gives the model back."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        *,
        functions: Functions,
        dims: Dims,
        seed: int,
        limit: int = 8,
        tolerance: float | None = None,
    ) -> None:
        self.model, self.functions, self.dims, self.seed = model, functions, dims, seed
        self.batch = spread_samples(batch, dims, limit)
        self.total = num_samples(self.batch, dims)
        cut = max(1, (self.total - 1) // 2)
        self.parts = (
            Part(start=0, stop=cut, total=self.total),
            Part(start=cut, stop=self.total, total=self.total),
        )
        self.whole = Part(start=0, stop=self.total, total=self.total)
        self.state = ModuleState.capture(model)
        self.scope = DrawScope(model, [name for name, _ in model.named_modules()])
        self.tolerance = tolerance_of(model) if tolerance is None else tolerance

    def close(self) -> None:
        """Take the hooks off the model and restore its state."""
        self.scope.remove()
        self.state.restore(self.model)

    def stream(
        self, part: Part, sites: dict[tuple[str, int], int | None], log: DrawLog | None = None
    ) -> DrawStream:
        """Return the random numbers of `part`."""
        return DrawStream(seed=self.seed, step=0, part=part, sites=sites, log=log)

    def forward_only(self, batch: Any, part: Part, log: DrawLog) -> Any:
        """Return the output of `batch`, forward and loss watched by what the caller has opened."""
        self.state.restore(self.model)
        with self.scope.drawing_from(self.stream(part, {}, log)):
            output = self.functions.forward(self.model, batch)
            self.functions.loss(output, batch)
            return output

    def watch(self) -> Watched:
        """Watch whole and part of the batch; nothing is learnt of gradients yet."""
        long_log, short_log = DrawLog(), DrawLog()
        shorter_total = max(1, self.total - 1)
        with watch_uses(self.model) as uses:
            try:
                output = self.forward_only(self.batch, self.whole, long_log)
            except REJECTED as error:
                raise TargetError(
                    "the model or the loss cannot be run on the example batch",
                    found=first_line(error),
                    try_="check the batch, and that forward and loss run on one device",
                ) from error
        calls = dict(uses.calls)
        short_part = Part(start=0, stop=shorter_total, total=self.total)
        short_batch = slice_batch(self.batch, self.dims, 0, shorter_total)
        shorter, whole_only = output, ""
        try:
            shorter = self.forward_only(short_batch, short_part, short_log)
        except REJECTED as error:
            whole_only = first_line(error)
        statistics = GlobalStatistics(self.whole, LocalExchange(), weighted=False, watch=True)
        loss_watch = GlobalStatistics(self.whole, LocalExchange(), weighted=False, watch=True)
        with statistics:
            again = self._forward_again()
        with loss_watch, self.scope.drawing_from(self.stream(self.whole, {})):
            made = self.functions.loss(again, self.batch)
        short_watch = GlobalStatistics(self.whole, LocalExchange(), weighted=False, watch=True)
        if not whole_only:
            with short_watch, self.scope.drawing_from(self.stream(short_part, {})):
                self.functions.loss(shorter, short_batch)
        inside = self.functions.own_loss or any(t.dim() == 0 and t.requires_grad for t in tensors(again))
        in_model = statistics.cross or (inside and (statistics.masks or statistics.counts))
        sites = {(site.module, site.index): site.dim for site in find_sites(long_log, short_log)}
        from_python = self._draws_from_python()
        return Watched(
            output=output,
            shorter=shorter,
            sites=sites,
            drawing=tuple(dict.fromkeys(module for module, _ in sites)),
            forward_only=tuple(n for n, count in calls.items() if count == 1 and n and n not in uses.outside),
            norms=statistics.num_norms > 0,
            counts=loss_watch.counts or in_model,
            in_model=in_model,
            selects=loss_watch.selects or loss_watch.collapses(short_watch),
            totals=is_total_and_count(made),
            drew=bool(long_log.shapes) or from_python,
            from_python=from_python,
            branches=statistics.selects or self._has_plain_inputs(),
            masks=statistics.masks and not statistics.cross and not (inside and statistics.counts),
            loss_inside=inside,
            whole_only=whole_only,
        )

    def _draws_from_python(self) -> bool:
        """Whether forward or loss take numbers from Python's or numpy's global generator."""
        with seeded_python(0):
            before = (random.getstate(), str(np.random.get_state()))
            self.state.restore(self.model)
            with DrawMode(self.stream(self.whole, {})):
                output = self.functions.forward(self.model, self.batch)
                self.functions.loss(output, self.batch)
            return (random.getstate(), str(np.random.get_state())) != before

    def _has_plain_inputs(self) -> bool:
        """Whether the batch holds Python values, on which a branch of the model may depend."""
        return any(not isinstance(leaf, torch.Tensor) and leaf is not None for leaf in flatten(self.batch)[0])

    def _forward_again(self) -> Any:
        """The forward with gradients, so that sums of data and of outputs can be told apart."""
        self.state.restore(self.model)
        with self.scope.drawing_from(self.stream(self.whole, {})):
            return self.functions.forward(self.model, self.batch)

    def truth(self, watched: Watched) -> tuple[Truth, ModuleState]:
        """Return the one-device result and the state that it leaves."""
        kind = LossKind.TOTAL_COUNT if watched.totals else LossKind.MEAN
        run = self.run(self.batch, self.whole, PartRule(kind=kind), LocalExchange(), watched)
        gradients = gradients_of(run.loss.objective, self.model)
        buffers = {name: b.detach().clone() for name, b in buffers_of(self.model).items()}
        state = ModuleState.capture(self.model)
        floors = noise_floor(gradients, self.tolerance)
        loss = float(run.loss.value)
        moved_loss, moved = self._one_unit_away(kind, watched)
        for name, g in gradients.items():
            other = moved.get(name)
            if g is not None and other is not None:
                change = float((wide(other) - wide(g)).norm())
                size = cancelled_size(dense(g), floors.get(name, 0.0), self.tolerance)
                floors[name] = moved_floor(change, size, floors.get(name, 0.0), self.tolerance)
        truth = Truth(
            batch=self.batch,
            loss=loss,
            gradients=gradients,
            buffers=buffers,
            floors=floors,
            loss_floor=moved_floor(abs(moved_loss - loss), abs(loss), 1e-12, self.tolerance),
        )
        return truth, state

    def _one_unit_away(self, kind: LossKind, watched: Watched) -> tuple[float, Gradients]:
        """Loss and gradients with every weight moved by one rounding unit (see Note [Rounding])."""
        generator = torch.Generator().manual_seed(self.seed)
        held = {n: p.detach().clone() for n, p in self.model.named_parameters() if p.is_floating_point()}
        named = dict(self.model.named_parameters())
        try:
            with torch.no_grad():
                for name, value in held.items():
                    sign = torch.randint(0, 2, value.shape, generator=generator).mul_(2).sub_(1)
                    eps = torch.finfo(value.dtype).eps
                    named[name].add_(value * (sign.to(value.device, value.dtype) * eps))
            run = self.run(self.batch, self.whole, PartRule(kind=kind), LocalExchange(), watched)
            return float(run.loss.value), gradients_of(run.loss.objective, self.model)
        finally:
            with torch.no_grad():
                for name, value in held.items():
                    named[name].copy_(value)

    def run(
        self,
        batch: Any,
        part: Part,
        rule: PartRule,
        exchange: Any,
        watched: Watched,
        gatherer: Any = None,
        *,
        fresh: bool = True,
    ) -> PartRun:
        """Run one part by a rule, from the state at the start unless it is not to be `fresh`."""
        if fresh:
            self.state.restore(self.model)
        stream = self.stream(part, watched.sites) if watched.drew else None
        return run_part(
            self.model,
            batch,
            part,
            functions=self.functions,
            rule=rule,
            exchange=exchange,
            stream=stream,
            scope=self.scope,
            gatherer=gatherer,
        )
