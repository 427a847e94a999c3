"""Find the exact way to split a model's batch, by a small real run in one process.

Note [Probe]
The whole of a small batch is run once as on one device: the truth. Then the same samples are run in two
parts, with what the parts would exchange replayed from the whole (see batching.exchange), and loss,
gradients and buffers are added up by the rule under trial. A rule is accepted only if all agree. The rules
are tried from cheap to general; where a loss divides by a count of its data, the plain mean is not tried,
since a batch on which all counts are equal would let it pass.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
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
    RecordingExchange,
    ReplayError,
    ReplayExchange,
    WholeGatherer,
    buffers_of,
    equal_values,
    find_rows,
    find_rule,
    find_sites,
    flatten,
    hidden_tensors,
    is_total_and_count,
    num_samples,
    seeded_python,
    slice_batch,
    spread_samples,
)
from ..batching.forward import Functions, PartRule, PartRun, run_part
from ..batching.gathering import Rows
from ..batching.losses import GatherPlan, check_scalar
from ..batching.statistics import GlobalStatistics
from ..errors import RefusedError, TargetError
from ..records import BufferRule, LossKind, Refusal, Traits
from .findings import Findings, Truth, worst_error
from .rounding import Gradients, dense, noise_floor, tolerance_of
from .watching import unchanged_rng, watch_uses


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watched:
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
    branches: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """One rule over the two parts: whether it gave the truth, and the parts' states."""

    worst: float
    name: str
    states: tuple[ModuleState, ...]
    used: tuple[frozenset[str], ...]
    single_loss: bool
    changed: tuple[dict[str, Any], ...] = ()


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _gradients(objective: torch.Tensor, model: nn.Module) -> Gradients:
    parameters = _trainable(model)
    if not objective.requires_grad:
        raise TargetError(
            "the loss does not depend on any trainable parameter",
            try_="check requires_grad and that loss() does not detach the output",
        )
    found = torch.autograd.grad(objective, list(parameters.values()), allow_unused=True)
    return dict(zip(parameters, found, strict=True))


class Probe:
    """One probing of one model, by `run` or `retake`."""

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

    def run(self) -> Findings:
        """Return the findings; the model is left as it was.

        Raises: TargetError if the model or the loss cannot be used at all.
        """
        with unchanged_rng():
            try:
                return self._find()
            finally:
                self.scope.remove()
                self.state.restore(self.model)

    def retake(self, findings: Findings) -> Findings:
        """Return `findings` with the truth of this probe's functions: the same model in other arithmetic."""
        with unchanged_rng():
            try:
                truth, _ = self._truth(self._watch())
            finally:
                self.scope.remove()
                self.state.restore(self.model)
        return replace(findings, functions=self.functions, truth=truth)

    def _find(self) -> Findings:
        watched = self._watch()
        truth, state = self._truth(watched)
        if self.total < 2:
            return self._refused(
                watched, truth, "the example holds one sample; a split of the batch cannot be proved"
            )
        if not torch.isfinite(torch.tensor(truth.loss)):
            raise TargetError("the loss of the first batch is not finite", found=f"{truth.loss}")
        failures = []
        for rule in self._rules(watched):
            trial = self._try(rule, watched, truth)
            if isinstance(trial, str):
                failures.append(f"{rule.kind.value}: {trial}")
                continue
            findings = self._accept(rule, trial, watched, truth, state)
            if findings is not None:
                return findings
            failures.append(f"{rule.kind.value}: {self._complaint(trial)}")
        return self._refused(
            watched, truth, "the answer for one sample depends on the other samples of its batch", failures
        )

    # ---- forward passes

    def _stream(
        self, part: Part, sites: dict[tuple[str, int], int | None], log: DrawLog | None = None
    ) -> DrawStream:
        return DrawStream(seed=self.seed, step=0, part=part, sites=sites, log=log)

    def _forward_only(self, batch: Any, part: Part, log: DrawLog) -> Any:
        self.state.restore(self.model)
        with torch.no_grad(), self.scope.drawing_from(self._stream(part, {}, log)):
            return self.functions.forward(self.model, batch)

    def _watch(self) -> _Watched:
        long_log, short_log = DrawLog(), DrawLog()
        shorter_total = max(1, self.total - 1)
        with watch_uses(self.model) as uses:
            output = self._forward_only(self.batch, self.whole, long_log)
        calls = dict(uses.calls)
        short_part = Part(start=0, stop=shorter_total, total=self.total)
        shorter = self._forward_only(
            slice_batch(self.batch, self.dims, 0, shorter_total), short_part, short_log
        )
        statistics = GlobalStatistics(self.whole, LocalExchange(), weighted=False, watch=True)
        loss_watch = GlobalStatistics(self.whole, LocalExchange(), weighted=False, watch=True)
        with statistics:
            again = self._forward_again()
        with loss_watch:
            made = self.functions.loss(again, self.batch)
        in_model = statistics.counts if self.functions.own_loss else statistics.cross
        sites = {(site.module, site.index): site.dim for site in find_sites(long_log, short_log)}
        return _Watched(
            output=output,
            shorter=shorter,
            sites=sites,
            drawing=tuple(dict.fromkeys(module for module, _ in sites)),
            forward_only=tuple(n for n, count in calls.items() if count == 1 and n and n not in uses.outside),
            norms=statistics.num_norms > 0,
            counts=loss_watch.counts or in_model,
            in_model=in_model,
            selects=loss_watch.selects,
            totals=is_total_and_count(made),
            drew=bool(long_log.shapes) or self._draws_from_python(),
            branches=statistics.selects or self._has_plain_inputs(),
        )

    def _draws_from_python(self) -> bool:
        """Whether forward takes numbers from Python's or numpy's global generator."""
        with seeded_python(0):
            before = (random.getstate(), str(np.random.get_state()))
            self.state.restore(self.model)
            with torch.no_grad(), DrawMode(self._stream(self.whole, {})):
                self.functions.forward(self.model, self.batch)
            return (random.getstate(), str(np.random.get_state())) != before

    def _has_plain_inputs(self) -> bool:
        """Whether the batch holds Python values, on which a branch of the model may depend."""
        return any(not isinstance(leaf, torch.Tensor) and leaf is not None for leaf in flatten(self.batch)[0])

    def _forward_again(self) -> Any:
        """The forward with gradients, so that sums of data and of outputs can be told apart."""
        self.state.restore(self.model)
        with self.scope.drawing_from(self._stream(self.whole, {})):
            return self.functions.forward(self.model, self.batch)

    def _truth(self, watched: _Watched) -> tuple[Truth, ModuleState]:
        kind = LossKind.TOTAL_COUNT if watched.totals else LossKind.MEAN
        run = self._run(self.batch, self.whole, PartRule(kind=kind), LocalExchange(), watched)
        gradients = _gradients(run.loss.objective, self.model)
        buffers = {name: b.detach().clone() for name, b in buffers_of(self.model).items()}
        state = ModuleState.capture(self.model)
        floors = noise_floor(gradients, self.tolerance)
        loss = float(run.loss.value)
        moved_loss, moved = self._one_unit_away(kind, watched)
        for name, g in gradients.items():
            other = moved.get(name)
            if g is not None and other is not None:
                noise = 8 * float((dense(other).double() - dense(g).double()).norm()) / self.tolerance
                floors[name] = max(floors[name], noise)
        truth = Truth(
            batch=self.batch,
            loss=loss,
            gradients=gradients,
            buffers=buffers,
            floors=floors,
            loss_floor=max(1e-12, 8 * abs(moved_loss - loss) / self.tolerance),
        )
        return truth, state

    def _one_unit_away(self, kind: LossKind, watched: _Watched) -> tuple[float, Gradients]:
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
            run = self._run(self.batch, self.whole, PartRule(kind=kind), LocalExchange(), watched)
            return float(run.loss.value), _gradients(run.loss.objective, self.model)
        finally:
            with torch.no_grad():
                for name, value in held.items():
                    named[name].copy_(value)

    def _run(
        self, batch: Any, part: Part, rule: PartRule, exchange: Any, watched: _Watched, gatherer: Any = None
    ) -> PartRun:
        self.state.restore(self.model)
        stream = self._stream(part, watched.sites) if watched.drew else None
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

    # ---- rules

    def _rules(self, watched: _Watched) -> list[PartRule]:
        if watched.totals:
            return [PartRule(kind=LossKind.TOTAL_COUNT, norms=watched.norms)]
        rules = []
        if watched.counts and (watched.in_model or not watched.selects):
            rules.append(PartRule(kind=LossKind.WEIGHTED, in_model=watched.in_model, norms=watched.norms))
        elif not watched.selects:
            rules.append(PartRule(kind=LossKind.MEAN, norms=watched.norms))
        plan = None if self.functions.own_loss else self._gather_plan(watched)
        if plan is not None:
            rules.append(PartRule(kind=LossKind.GATHER, norms=watched.norms, gather=plan))
        return rules

    def _gather_plan(self, watched: _Watched) -> GatherPlan | None:
        rows = find_rows(watched.output, watched.shorter, self.total, max(1, self.total - 1))
        if rows is None or hidden_tensors(watched.output):
            return None
        leaves = flatten(self.batch)[0]
        batch = tuple(
            Rows(dim=dim) if dim is not None and self._reads(watched.output, index) else Rows(dim=None)
            for index, (_, dim) in enumerate(zip(leaves, self.dims, strict=True))
        )
        return GatherPlan(output=rows, batch=batch)

    def _reads(self, output: Any, index: int) -> bool:
        """Whether the loss reads leaf `index` of the batch: it fails or changes when the leaf is emptied."""
        leaves, rebuild = flatten(self.batch)
        changed = list(leaves)
        changed[index] = leaves[index].new_empty((0,))
        with torch.no_grad():
            plain = self.functions.loss(output, self.batch)
            try:
                other = self.functions.loss(output, rebuild(changed))
            except (RuntimeError, ValueError, IndexError, TypeError, AttributeError, AssertionError):
                return True
        return not torch.equal(check_scalar(plain), check_scalar(other))

    def _try(self, rule: PartRule, watched: _Watched, truth: Truth) -> _Trial | str:
        recording = RecordingExchange()
        whole_output: list[Any] = []
        try:
            if rule.norms or rule.kind in (LossKind.WEIGHTED, LossKind.TOTAL_COUNT, LossKind.GATHER):
                exact = (
                    rule if rule.kind is not LossKind.GATHER else PartRule(kind=LossKind.MEAN, norms=rule.norms)
                )
                run = self._run(self.batch, self.whole, exact, recording, watched)
                _gradients(run.loss.objective, self.model)
                whole_output = self._gathered_leaves(run.output, rule)
            return self._run_parts(rule, watched, truth, recording, whole_output)
        except (ReplayError, RefusedError) as error:
            return str(error).splitlines()[0]
        except RuntimeError as error:
            return f"a part of the batch cannot be run: {str(error).splitlines()[0]}"

    def _gathered_leaves(self, output: Any, rule: PartRule) -> list[Any]:
        if rule.gather is None:
            return []
        pairs = [*zip(flatten(output)[0], rule.gather.output, strict=True)]
        pairs += [*zip(flatten(self.batch)[0], rule.gather.batch, strict=True)]
        return [leaf for leaf, rows in pairs if rows.dim is not None and isinstance(leaf, torch.Tensor)]

    def _run_parts(
        self, rule: PartRule, watched: _Watched, truth: Truth, recording: RecordingExchange, whole: list[Any]
    ) -> _Trial:
        gradients: Gradients = dict.fromkeys(truth.gradients)
        loss, states, used, singles, changed = 0.0, [], [], [], []
        for part in self.parts:
            batch = slice_batch(self.batch, self.dims, part.start, part.stop)
            replay = ReplayExchange(recording.values)
            gatherer = WholeGatherer(whole=whole, part=part)
            run = self._run(batch, part, rule, replay, watched, gatherer)
            found = _gradients(run.loss.objective, self.model)
            loss += float(run.loss.value)
            states.append(ModuleState.capture(self.model))
            changed.append(self.state.changed_attributes(self.model))
            used.append(frozenset(name for name, g in found.items() if g is not None))
            met = run.weighted
            singles.append(
                len(met) == 1
                and replay.position == 1
                and torch.equal(met[0].detach() * part.weight, run.loss.value)
            )
            for name, g in found.items():
                if g is not None:
                    held = gradients[name]
                    gradients[name] = dense(g) if held is None else held + dense(g)
        worst, name = worst_error(gradients, truth)
        loss_error = abs(loss - truth.loss) / max(abs(truth.loss), truth.loss_floor)
        if loss_error > max(worst, self.tolerance):
            worst, name = loss_error, "the loss"
        return _Trial(
            worst=worst,
            name=name,
            states=tuple(states),
            used=tuple(used),
            single_loss=all(singles),
            changed=tuple(changed),
        )

    # ---- verdicts

    def _complaint(self, trial: _Trial) -> str:
        return f"{trial.name or 'a buffer'} differs by {trial.worst:.1e}"

    def _accept(
        self, rule: PartRule, trial: _Trial, watched: _Watched, truth: Truth, state: ModuleState
    ) -> Findings | None:
        if trial.worst > self.tolerance:
            return None
        buffers = self._buffer_rules(trial, state)
        if isinstance(buffers, str):
            return self._refused(
                watched, truth, f"buffer '{buffers}' is computed from the batch in a way that parts cannot keep"
            )
        attributes = self._attribute_changes(trial)
        if isinstance(attributes, str):
            return self._refused(
                watched, truth, f"attribute '{attributes}' is computed from the batch and is not a buffer"
            )
        names = frozenset(name for name, g in truth.gradients.items() if g is not None)
        several = not watched.norms and not attributes
        traits = Traits(
            loss=rule.kind,
            buffers=buffers,
            draws=watched.drew,
            batch_norm=watched.norms,
            conditional=watched.branches or bool(attributes) or any(used != names for used in trial.used),
            accumulates=several,
            two_pass=rule.kind is LossKind.GATHER or (rule.kind is LossKind.WEIGHTED and not trial.single_loss),
            forward_only=watched.forward_only,
            unused=tuple(name for name, g in truth.gradients.items() if g is None),
            sparse=tuple(name for name, g in truth.gradients.items() if g is not None and g.is_sparse),
            notes=self._notes(watched, attributes, buffers),
        )
        return self._findings(traits, rule, watched, truth, single_loss=trial.single_loss)

    def _findings(
        self, traits: Traits, rule: PartRule, watched: _Watched, truth: Truth, *, single_loss: bool = False
    ) -> Findings:
        return Findings(
            traits=traits,
            rule=rule,
            functions=self.functions,
            dims=self.dims,
            sites=watched.sites,
            drawing=watched.drawing,
            single_loss=single_loss,
            truth=truth,
        )

    @staticmethod
    def _notes(
        watched: _Watched, attributes: tuple[str, ...], buffers: dict[str, BufferRule]
    ) -> tuple[str, ...]:
        notes = []
        if watched.norms:
            notes.append(
                "batch-norm statistics are those of the global batch; gradient accumulation is excluded"
            )
        if attributes:
            notes.append(f"forward changes {', '.join(attributes[:3])}; gradient accumulation is excluded")
        averaged = [name for name, rule in buffers.items() if rule is not BufferRule.SAME]
        notes += [f"buffer {name} is combined over ranks by {buffers[name].value}" for name in averaged]
        return tuple(notes)

    def _buffer_rules(self, trial: _Trial, state: ModuleState) -> dict[str, BufferRule] | str:
        rules: dict[str, BufferRule] = {}
        weights = [part.weight for part in self.parts]
        for name, start in self.state.buffers.items():
            parts = [held.buffers[name] for held in trial.states]
            whole = state.buffers[name]
            if all(torch.equal(value, start) for value in (whole, *parts)):
                continue
            rule = find_rule(start, whole, parts, weights, self.tolerance)
            if rule is None:
                return name
            rules[name] = rule
        return rules

    def _attribute_changes(self, trial: _Trial) -> tuple[str, ...] | str:
        first = trial.changed[0]
        for other in trial.changed[1:]:
            for name in first.keys() | other.keys():
                if name not in first or name not in other or not equal_values(first[name], other[name]):
                    return name
        return tuple(first)

    def _refused(
        self, watched: _Watched, truth: Truth, reason: str, failures: list[str] | None = None
    ) -> Findings:
        found = "; ".join(failures or [])
        if self.functions.own_loss:
            try_ = (
                "move the loss out of the model into loss(output, batch), where the whole batch can be gathered"
            )
        elif hidden_tensors(watched.output):
            try_ = f"return a dict, tuple or dataclass instead of {hidden_tensors(watched.output)[0]}"
        else:
            try_ = (
                "move what couples the samples (a balance term, a batch statistic) from the model into loss()"
            )
        traits = Traits(
            draws=watched.drew,
            batch_norm=watched.norms,
            refusal=Refusal(reason=reason, found=found, try_=try_),
        )
        kind = LossKind.TOTAL_COUNT if watched.totals else LossKind.MEAN
        return self._findings(traits, PartRule(kind=kind), watched, truth)
