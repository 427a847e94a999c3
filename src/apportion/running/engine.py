"""Forward and backward over this rank's share of a global batch: gradients of the global loss, nothing else.

Note [Micro-batches]
With one micro-batch, parts exchange as they go. With several, what a part must know of the others has to be
there before its backward: a single count is estimated and corrected at the end (DelayedExchange); several
counts are collected by a first forward (CountingExchange); a loss over the whole batch's outputs is taken
after a first forward without gradients, and the outputs' gradients drive a second one (the scheme of
Gao et al. 2021, "Scaling deep contrastive learning batch size under memory limited setup").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..applying import Applied
from ..batching import (
    CountingExchange,
    DelayedExchange,
    DrawScope,
    DrawStream,
    Exchange,
    GlobalStatistics,
    GroupExchange,
    LocalExchange,
    Part,
    ReplayExchange,
    RowGatherer,
    flatten,
)
from ..batching.forward import PartRun, run_output, run_part
from ..batching.losses import PartLoss, part_loss
from ..profiling.findings import Findings
from ..records import LossKind
from .buffers import BufferKeeper
from .portions import Piece, Share, rank_parts

EVALUATION = -1  # the step that keys random numbers of validation


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """This rank among the ranks that share the batch; `group` is for what the wrappers do not exchange."""

    rank: int
    num_ranks: int
    device: torch.device
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """The result of the passes: this rank's part of the loss, the samples it ran, and the late correction."""

    value: torch.Tensor
    samples: int
    correction: float = 1.0


class Engine:
    """Runs shares through an applied module."""

    def __init__(self, applied: Applied, findings: Findings, place: Place, *, seed: int) -> None:
        self.applied, self.findings, self.place, self.seed = applied, findings, place, seed
        self.traits = findings.traits
        self.scope = DrawScope(applied.model, findings.drawing if self.traits.draws else ())
        applied.state.scope = self.scope
        self.keeper = BufferKeeper(
            applied.model, self.traits.buffers, group=place.group, num_ranks=place.num_ranks
        )

    def run(self, share: Share, step: int, *, scale: float = 1.0) -> Passed:
        """Leave the gradients of `scale` times the global loss in the parameters; collective.

        `step` keys the random numbers. Buffers get their one-device values.
        """
        self.keeper.begin()
        factor = scale * self.place.num_ranks
        passed = self._run_passes(share, step, factor)
        if not (self.keeper.simple and len(share.pieces) == 1):
            self.keeper.finish()
        self.applied.finish_gradients()
        return passed

    def evaluate(self, share: Share) -> tuple[float, list[Any]]:
        """Return what this rank's share adds to the loss of its global batch, and the output of each piece.

        Collective; to be called in evaluation mode and without gradients.
        """
        rule, several = self.findings.rule, len(share.pieces) > 1
        if several and rule.kind is LossKind.GATHER:
            outputs = [self._first_output(piece, EVALUATION) for piece in share.pieces]
            live = [i for i, piece in enumerate(share.pieces) if piece.part.num_samples] or [0]
            loss = self._merged_loss(share, [flatten(outputs[i])[0] for i in live], live, outputs[live[0]])
            return float(loss.value), outputs
        exchange = self._exchange()
        delayed = DelayedExchange(exchange, len(share.pieces))
        if several and rule.kind is LossKind.WEIGHTED and not self.findings.single_loss:
            exchange = self._counted(share, EVALUATION)
        elif several and rule.kind is not LossKind.MEAN:
            exchange = delayed
        value, outputs = 0.0, []
        for piece in share.pieces:
            if isinstance(exchange, ReplayExchange):
                exchange.position = 0
            run = self._call(piece, EVALUATION, exchange, share.total)
            value += float(run.loss.value)
            outputs.append(run.output)
        return value * (delayed.correction() if delayed.estimate is not None else 1.0), outputs

    def _call(self, piece: Piece, step: int, exchange: Exchange, total: int) -> PartRun:
        runs: list[PartRun] = []

        def work(model: nn.Module) -> torch.Tensor:
            runs.append(self._forward(model, piece, step, exchange=exchange, total=total))
            return runs[0].loss.objective

        with self.applied.synced(False):
            self.applied.call(work)
        return runs[0]

    def _exchange(self) -> Exchange:
        return GroupExchange(self.place.group) if self.place.num_ranks > 1 else LocalExchange()

    def _run_passes(self, share: Share, step: int, factor: float) -> Passed:
        kind, several = self.findings.rule.kind, len(share.pieces) > 1
        if not several or kind is LossKind.MEAN:
            return self._one_pass(share, step, factor, self._exchange())
        if kind is LossKind.GATHER:
            return self._gathered_passes(share, step, factor)
        if kind is LossKind.WEIGHTED and not self.findings.single_loss:
            return self._one_pass(share, step, factor, self._counted(share, step))
        delayed = DelayedExchange(self._exchange(), len(share.pieces))
        passed = self._one_pass(share, step, factor, delayed)
        correction = delayed.correction()
        return Passed(value=passed.value * correction, samples=passed.samples, correction=correction)

    def _one_pass(self, share: Share, step: int, factor: float, exchange: Exchange) -> Passed:
        value, samples = torch.zeros((), dtype=torch.float64, device=self.place.device), 0
        last = len(share.pieces) - 1
        for index, piece in enumerate(share.pieces):
            if isinstance(exchange, ReplayExchange):
                exchange.position = 0
            run = self._backward(piece, step, factor, exchange=exchange, sync=index == last, total=share.total)
            value = value + run.loss.value.double()
            samples += piece.part.num_samples
            self._note_buffers(piece.part, last=index == last)
        return Passed(value=value, samples=samples)

    def _note_buffers(self, part: Part, *, last: bool) -> None:
        if self.traits.buffers:
            self.keeper.add(part)
            if not last:
                self.keeper.rewind()

    def _backward(
        self, piece: Piece, step: int, factor: float, *, exchange: Exchange, sync: bool, total: int
    ) -> PartRun:
        runs: list[PartRun] = []

        def work(model: nn.Module) -> torch.Tensor:
            runs.append(self._forward(model, piece, step, exchange=exchange, total=total))
            return runs[0].loss.objective * factor

        with self.applied.synced(sync):
            objective = self.applied.call(work)
            torch.autograd.backward(objective)
        return runs[0]

    def _forward(self, model: nn.Module, piece: Piece, step: int, *, exchange: Exchange, total: int) -> PartRun:
        self._note_statistics(piece.part, exchange)
        return run_part(
            model,
            piece.batch,
            piece.part,
            functions=self.findings.functions,
            rule=self.findings.rule,
            exchange=exchange,
            stream=self.stream(piece.part, step),
            scope=self.scope,
            gatherer=self.gatherer(total),
        )

    def _output(self, model: nn.Module, piece: Piece, step: int) -> Any:
        exchange = self._exchange()
        self._note_statistics(piece.part, exchange)
        return run_output(
            model,
            piece.batch,
            piece.part,
            functions=self.findings.functions,
            rule=self.findings.rule,
            exchange=exchange,
            stream=self.stream(piece.part, step),
            scope=self.scope,
        )

    def _note_statistics(self, part: Part, exchange: Exchange) -> None:
        if self.findings.rule.norms:
            self.applied.state.statistics = lambda: GlobalStatistics(part, exchange, weighted=False)

    def stream(self, part: Part, step: int) -> DrawStream | None:
        """Return the random numbers of `part` in `step`; None for a model that draws none."""
        if not self.traits.draws:
            return None
        return DrawStream(seed=self.seed, step=step, part=part, sites=self.findings.sites)

    def gatherer(self, total: int) -> RowGatherer:
        """Return what brings the rows of the other ranks."""
        return RowGatherer(rank_parts(total, self.place.num_ranks), self.place.rank, self.place.group)

    def _counted(self, share: Share, step: int) -> ReplayExchange:
        """Run all forwards once to add up what the losses count, over micro-batches and ranks."""
        counting = CountingExchange()
        for piece in share.pieces:
            counting.restart()
            self._call(piece, step, counting, share.total)
            self.keeper.rewind()
        exchange = self._exchange()
        return ReplayExchange([exchange.sum(total) for total in counting.totals])

    # ---- a loss over the whole batch's outputs, with several micro-batches

    def _gathered_passes(self, share: Share, step: int, factor: float) -> Passed:
        outputs = []
        for piece in share.pieces:
            outputs.append(self._first_output(piece, step))
            self.keeper.rewind()
        live = [i for i, piece in enumerate(share.pieces) if piece.part.num_samples] or [0]
        value, gradients = self._output_gradients(share, [outputs[i] for i in live], live)
        last = len(share.pieces) - 1
        for index, piece in enumerate(share.pieces):
            grads = gradients.get(index)
            with self.applied.synced(index == last):
                torch.autograd.backward(self.applied.call(self._surrogate(piece, step, grads, factor)))
            self._note_buffers(piece.part, last=index == last)
        return Passed(value=value, samples=sum(piece.part.num_samples for piece in share.pieces))

    def _first_output(self, piece: Piece, step: int) -> Any:
        held: list[Any] = []

        def work(model: nn.Module) -> torch.Tensor:
            held.append(self._output(model, piece, step))
            return torch.zeros((), device=self.place.device)

        with torch.no_grad(), self.applied.synced(False):
            self.applied.call(work)
        return held[0]

    def _output_gradients(
        self, share: Share, outputs: list[Any], live: list[int]
    ) -> tuple[torch.Tensor, dict[int, list[torch.Tensor | None]]]:
        """Take the loss over all ranks' outputs; return its value and the gradients by micro-batch and leaf."""
        leaves = [
            [
                leaf.detach().requires_grad_(leaf.is_floating_point())
                if isinstance(leaf, torch.Tensor)
                else leaf
                for leaf in flatten(output)[0]
            ]
            for output in outputs
        ]
        loss = self._merged_loss(share, leaves, live, outputs[0])
        torch.autograd.backward(loss.objective)
        gradients = {
            i: [leaf.grad if isinstance(leaf, torch.Tensor) else None for leaf in held]
            for i, held in zip(live, leaves, strict=True)
        }
        return loss.value.double(), gradients

    def _merged_loss(self, share: Share, leaves: list[list[Any]], live: list[int], like: Any) -> PartLoss:
        """Return the loss over the outputs of all micro-batches of all ranks; `like` is one of the outputs."""
        plan = self.findings.rule.gather
        assert plan is not None
        batches = [flatten(share.pieces[i].batch)[0] for i in live]
        return part_loss(
            LossKind.GATHER,
            rank_parts(share.total, self.place.num_ranks)[self.place.rank],
            output=flatten(like)[1](_merge(leaves, plan.output)),
            batch=flatten(share.pieces[live[0]].batch)[1](_merge(batches, plan.batch)),
            loss=self.findings.functions.loss,
            exchange=self._exchange(),
            gather=(plan, self.gatherer(share.total)),
            parameters=self.applied.model.parameters(),
        )

    def _surrogate(
        self, piece: Piece, step: int, grads: list[torch.Tensor | None] | None, factor: float
    ) -> Any:
        """Return the work whose objective has the given gradients with respect to the outputs."""

        def work(model: nn.Module) -> torch.Tensor:
            leaves = flatten(self._output(model, piece, step))[0]
            terms = [
                (leaf * _given(grads, i)).sum()
                for i, leaf in enumerate(leaves)
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad
            ]
            return (
                torch.stack([term.float() if term.dtype != torch.float64 else term for term in terms]).sum()
                * factor
            )

        return work


def _given(grads: list[torch.Tensor | None] | None, index: int) -> torch.Tensor | float:
    grad = None if grads is None else grads[index]
    return 0.0 if grad is None else grad


def _merge(pieces: list[list[Any]], rows: Any) -> list[Any]:
    merged = []
    for position, row in enumerate(rows):
        leaves = [piece[position] for piece in pieces]
        if row.dim is None or not isinstance(leaves[0], torch.Tensor):
            merged.append(leaves[0])
        else:
            merged.append(torch.cat(leaves, dim=row.dim))
    return merged
