"""Find the exact way to split a model's batch, by a small real run in one process.

Note [Probe]
The whole of a small batch is run once as on one device: the truth. Then the same samples are run in two
parts, with what the parts would exchange replayed from the whole (see batching.exchange), and loss,
gradients and buffers are added up by the rule under trial. A rule is accepted only if all agree. The rules
are tried from cheap to general; where a loss divides by a count of its data, the plain mean is not tried,
since a batch on which all counts are equal would let it pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..batching import (
    DrawWatch,
    LocalExchange,
    ModuleState,
    RecordingExchange,
    ReplayError,
    ReplayExchange,
    WholeGatherer,
    buffers_of,
    equal_values,
    find_rows,
    find_rule,
    flatten,
    hidden_tensors,
    restore_buffers,
    slice_batch,
)
from ..batching.forward import PartRule
from ..batching.gathering import Rows
from ..batching.losses import GatherPlan, check_scalar
from ..errors import RefusedError, TargetError
from ..records import BufferRule, LossKind, Refusal, Traits
from .findings import Findings, Truth, worst_error
from .rounding import Gradients, dense
from .runs import REJECTED, Runs, Watched, first_line, gradients_of
from .watching import unchanged_rng, watch_uses


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """One rule over the two parts: whether it gave the truth, and the parts' states."""

    worst: float
    name: str
    states: tuple[ModuleState, ...]
    used: tuple[frozenset[str], ...]
    single_loss: bool
    changed: tuple[dict[str, Any], ...] = ()


# Parts run backward from a multiple of the loss, as ranks do; it shows a backward that is not linear.
_FACTOR = 2.0
_REDRAWN = Refusal(
    reason="forward is run again in backward, without the random numbers and statistics of its samples",
    found="the model checkpoints its activations itself, with dropout or batch-norm inside",
    try_="switch the model's own checkpointing off and use --activation-checkpointing full",
)


class Probe:
    """One probing of one model, by `run` or `retake`."""

    def __init__(self, model: nn.Module, batch: Any, **settings: Any) -> None:
        """The arguments are those of `Runs`."""
        self.runs = Runs(model, batch, **settings)

    def run(self) -> Findings:
        """Return the findings; the model is left as it was.

        Raises: TargetError if the model or the loss cannot be used at all.
        """
        with unchanged_rng():
            try:
                return self._find()
            finally:
                self.runs.close()

    def retake(self, findings: Findings) -> Findings:
        """Return `findings` with the truth of this probe's functions: the same model in other arithmetic."""
        with unchanged_rng():
            try:
                truth, _ = self.runs.truth(self.runs.watch())
            finally:
                self.runs.close()
        return replace(findings, functions=self.runs.functions, truth=truth)

    def _find(self) -> Findings:
        watched = self.runs.watch()
        truth, state = self.runs.truth(watched)
        if self.runs.total < 2:
            return self._refused(
                watched, truth, "the example holds one sample; a split of the batch cannot be proved"
            )
        if not torch.isfinite(torch.tensor(truth.loss)):
            raise TargetError("the loss of the first batch is not finite", found=f"{truth.loss}")
        refusal = self._unsplittable(watched, truth)
        if refusal is not None:
            return self._findings(
                Traits(draws=watched.drew, batch_norm=watched.norms, refusal=refusal),
                PartRule(kind=LossKind.TOTAL_COUNT if watched.totals else LossKind.MEAN),
                watched,
                truth,
            )
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

    # ---- rules

    def _unsplittable(self, watched: Watched, truth: Truth) -> Refusal | None:
        """Return why no split can be proved, for a model whose whole batch is no reference for its parts."""
        if watched.whole_only:
            return Refusal(
                reason="the model cannot be run on a part of the batch",
                found=watched.whole_only,
                try_="take sizes from the tensors, and name their batch dimensions: BATCH_DIMS, or batch_dims=",
            )
        kind = LossKind.TOTAL_COUNT if watched.totals else LossKind.MEAN
        again = self.runs.run(self.runs.batch, self.runs.whole, PartRule(kind=kind), LocalExchange(), watched)
        with DrawWatch() as backward:
            gradients = gradients_of(again.loss.objective, self.runs.model)
        if backward.drew:
            return _REDRAWN
        worst, name = worst_error(gradients, truth)
        if max(worst, self._loss_error(float(again.loss.value), truth)) > self.runs.tolerance:
            return Refusal(
                reason="two runs of the same samples give different results",
                found=f"gradient of '{name}' differs by {worst:.1e} between them",
                try_="draw from torch's default generator, and keep what forward remembers in buffers",
            )
        return None

    @staticmethod
    def _loss_error(loss: float, truth: Truth) -> float:
        return abs(loss - truth.loss) / max(abs(truth.loss), truth.loss_floor)

    def _rules(self, watched: Watched) -> list[PartRule]:
        if watched.totals:
            return [PartRule(kind=LossKind.TOTAL_COUNT, norms=watched.norms)]
        rules = []
        if watched.counts and (watched.in_model or not watched.selects):
            rules.append(PartRule(kind=LossKind.WEIGHTED, in_model=watched.in_model, norms=watched.norms))
        if not watched.selects and (watched.masks or not watched.counts):
            rules.append(PartRule(kind=LossKind.MEAN, norms=watched.norms))
        plan = None if self.runs.functions.own_loss else self._gather_plan(watched)
        if plan is not None:
            rules.append(PartRule(kind=LossKind.GATHER, norms=watched.norms, gather=plan))
        return rules

    def _gather_plan(self, watched: Watched) -> GatherPlan | None:
        rows = find_rows(watched.output, watched.shorter, self.runs.total, max(1, self.runs.total - 1))
        if rows is None or hidden_tensors(watched.output):
            return None
        leaves = flatten(self.runs.batch)[0]
        batch = tuple(
            Rows(dim=dim) if dim is not None and self._reads(watched.output, index) else Rows(dim=None)
            for index, (_, dim) in enumerate(zip(leaves, self.runs.dims, strict=True))
        )
        return GatherPlan(output=rows, batch=batch)

    def _reads(self, output: Any, index: int) -> bool:
        """Whether the loss reads leaf `index` of the batch: it fails or changes when the leaf is emptied."""
        leaves, rebuild = flatten(self.runs.batch)
        changed = list(leaves)
        changed[index] = leaves[index].new_empty((0,))
        try:
            with self.runs.scope.drawing_from(self.runs.stream(self.runs.whole, {})):
                plain = self.runs.functions.loss(output, self.runs.batch)
            with self.runs.scope.drawing_from(self.runs.stream(self.runs.whole, {})):
                other = self.runs.functions.loss(output, rebuild(changed))
        except REJECTED:
            return True
        return not torch.equal(check_scalar(plain), check_scalar(other))

    def _try(self, rule: PartRule, watched: Watched, truth: Truth) -> _Trial | str:
        recording = RecordingExchange()
        whole_output: list[Any] = []
        try:
            if rule.norms or rule.kind in (LossKind.WEIGHTED, LossKind.TOTAL_COUNT, LossKind.GATHER):
                exact = (
                    rule if rule.kind is not LossKind.GATHER else PartRule(kind=LossKind.MEAN, norms=rule.norms)
                )
                run = self.runs.run(self.runs.batch, self.runs.whole, exact, recording, watched)
                gradients_of(run.loss.objective * _FACTOR, self.runs.model)
                whole_output = self._gathered_leaves(run.output, rule)
            return self._run_parts(rule, watched, truth, recording, whole_output)
        except (ReplayError, RefusedError) as error:
            return str(error).splitlines()[0]
        except REJECTED as error:
            return f"a part of the batch cannot be run: {first_line(error)}"

    def _gathered_leaves(self, output: Any, rule: PartRule) -> list[Any]:
        if rule.gather is None:
            return []
        pairs = [*zip(flatten(output)[0], rule.gather.output, strict=True)]
        pairs += [*zip(flatten(self.runs.batch)[0], rule.gather.batch, strict=True)]
        return [leaf for leaf, rows in pairs if rows.dim is not None and isinstance(leaf, torch.Tensor)]

    def _run_parts(
        self, rule: PartRule, watched: Watched, truth: Truth, recording: RecordingExchange, whole: list[Any]
    ) -> _Trial:
        gradients: Gradients = dict.fromkeys(truth.gradients)
        loss, states, used, singles, changed = 0.0, [], [], [], []
        for part in self.runs.parts:
            batch = slice_batch(self.runs.batch, self.runs.dims, part.start, part.stop)
            replay = ReplayExchange(recording.values)
            gatherer = WholeGatherer(whole=whole, part=part)
            run = self.runs.run(batch, part, rule, replay, watched, gatherer)
            found = {
                name: None if g is None else g / _FACTOR
                for name, g in gradients_of(run.loss.objective * _FACTOR, self.runs.model).items()
            }
            loss += float(run.loss.value)
            states.append(ModuleState.capture(self.runs.model))
            changed.append(self.runs.state.changed_attributes(self.runs.model))
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
        if loss_error > max(worst, self.runs.tolerance):
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
        self, rule: PartRule, trial: _Trial, watched: Watched, truth: Truth, state: ModuleState
    ) -> Findings | None:
        if trial.worst > self.runs.tolerance:
            return None
        buffers = self._buffer_rules(trial, state)
        if isinstance(buffers, str):
            return self._refused(
                watched, truth, f"buffer '{buffers}' is computed from the batch in a way that parts cannot keep"
            )
        attributes = self._attribute_changes(trial)
        if isinstance(attributes, str) and self._is_only_kept(watched, truth):
            attributes = ()
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
        self, traits: Traits, rule: PartRule, watched: Watched, truth: Truth, *, single_loss: bool = False
    ) -> Findings:
        return Findings(
            traits=traits,
            rule=rule,
            functions=self.runs.functions,
            dims=self.runs.dims,
            sites=watched.sites,
            drawing=watched.drawing,
            single_loss=single_loss,
            truth=truth,
        )

    @staticmethod
    def _notes(
        watched: Watched, attributes: tuple[str, ...], buffers: dict[str, BufferRule]
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
        weights = [part.weight for part in self.runs.parts]
        for name, start in self.runs.state.buffers.items():
            parts = [held.buffers[name] for held in trial.states]
            whole = state.buffers[name]
            if all(torch.equal(value, start) for value in (whole, *parts)):
                continue
            rule = find_rule(start, whole, parts, weights, self.runs.tolerance)
            if rule is None:
                return name
            rules[name] = rule
        return rules

    def _is_only_kept(self, watched: Watched, truth: Truth) -> bool:
        """Whether attributes that forward has set are never read by it: a second run on top gives the truth."""
        kind = LossKind.TOTAL_COUNT if watched.totals else LossKind.MEAN
        rule = PartRule(kind=kind)
        part = self.runs.parts[0]
        few = slice_batch(self.runs.batch, self.runs.dims, part.start, part.stop)
        self.runs.run(few, part, rule, LocalExchange(), watched)
        for _ in range(2):
            restore_buffers(buffers_of(self.runs.model), self.runs.state.buffers)
            run = self.runs.run(self.runs.batch, self.runs.whole, rule, LocalExchange(), watched, fresh=False)
            worst, _ = worst_error(gradients_of(run.loss.objective, self.runs.model), truth)
            if max(worst, self._loss_error(float(run.loss.value), truth)) > self.runs.tolerance:
                return False
        return True

    def _attribute_changes(self, trial: _Trial) -> tuple[str, ...] | str:
        first = trial.changed[0]
        for other in trial.changed[1:]:
            for name in first.keys() | other.keys():
                if name not in first or name not in other or not equal_values(first[name], other[name]):
                    return name
        return tuple(first)

    def _recomputes(self, watched: Watched) -> bool:
        """Whether modules are called in the backward pass: the model checkpoints its activations itself."""
        kind = LossKind.TOTAL_COUNT if watched.totals else LossKind.MEAN
        run = self.runs.run(self.runs.batch, self.runs.whole, PartRule(kind=kind), LocalExchange(), watched)
        with watch_uses(self.runs.model) as uses:
            gradients_of(run.loss.objective, self.runs.model)
        return bool(uses.calls)

    def _is_linear(self, watched: Watched, truth: Truth) -> bool:
        """Whether twice the loss has twice the gradients."""
        kind = LossKind.TOTAL_COUNT if watched.totals else LossKind.MEAN
        run = self.runs.run(self.runs.batch, self.runs.whole, PartRule(kind=kind), LocalExchange(), watched)
        twice = gradients_of(run.loss.objective * _FACTOR, self.runs.model)
        half = {name: None if g is None else g / _FACTOR for name, g in twice.items()}
        return worst_error(half, truth)[0] <= self.runs.tolerance

    def _refused(
        self, watched: Watched, truth: Truth, reason: str, failures: list[str] | None = None
    ) -> Findings:
        found = "; ".join(failures or [])
        try_ = ""
        if failures and (watched.drew or watched.norms) and self._recomputes(watched):
            reason, try_ = _REDRAWN.reason, _REDRAWN.try_
        elif failures and not self._is_linear(watched, truth):
            reason = (
                "the gradient of a part is not its share: a hook or an autograd function changes it unevenly"
            )
            try_ = "scale or clip gradients after the step's backward (--clip-norm), or drop the hook"
        elif failures and watched.from_python:
            reason = "Python's or numpy's random numbers are drawn for the samples, and cannot be tied to them"
            try_ = "draw with torch, or switch this randomness off (mask_time_prob=0 in a wav2vec2 config)"
        elif self.runs.total < 2:
            try_ = "a batch of two samples or more, or --strategy single"
        elif self.runs.functions.own_loss or watched.loss_inside:
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
