"""Say why: the chosen layout, the next ones and why each lost, what limits the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from ..records import Candidate, Checkpointing, Estimate, Plan, Precision, Seconds
from ..units import format_bytes, format_count, format_seconds
from .situation import Situation

_PARTS = {
    "compute": "forward and backward",
    "recompute": "recomputing activations",
    "bubble": "waiting for pipeline stages",
    "tp_exposed": "tensor-parallel communication",
    "dp_exposed": "data-parallel communication",
    "pp_exposed": "moving activations between devices",
    "optimizer": "the optimizer step",
    "other": "overhead of calls",
}
_SHOWN = 2
_NOTABLE = 0.01


def reasons(situation: Situation, candidates: tuple[Candidate, ...], searched: int) -> tuple[Candidate, ...]:
    """Return the candidates with their reasons; the first is the pick and also names the next two."""
    best = candidates[0]
    others = tuple(replace(other, why=(_why_lost(best, other),)) for other in candidates[1:])
    why = [
        f"{best.name} is the fastest that fits of {searched} layouts: "
        f"{format_seconds(best.estimate.step_seconds)} per step, "
        f"{format_bytes(best.estimate.memory_bytes.peak)} of {format_bytes(situation.usable_bytes)} per device."
    ]
    why += [f"{other.name}: {other.why[0]}" for other in _next(best, others)]
    why.append(_limit(best.estimate))
    why += _precision_note(situation)
    return (replace(best, why=tuple(why)), *others)


def _next(best: Candidate, others: tuple[Candidate, ...]) -> list[Candidate]:
    """Return the next two, of other strategies where there are any: they say more than another micro-batch."""
    different: dict[object, Candidate] = {}
    for other in others:
        if other.strategy is not best.strategy:
            different.setdefault(other.strategy, other)
    return [*different.values(), *(o for o in others if o.strategy is best.strategy)][:_SHOWN]


def _why_lost(best: Candidate, other: Candidate) -> str:
    """Return by how much and through which part another candidate is slower."""
    lost = other.estimate.step_seconds - best.estimate.step_seconds
    share = lost / best.estimate.step_seconds
    if share < _NOTABLE / 10:
        less = best.estimate.memory_bytes.peak < other.estimate.memory_bytes.peak
        return "as fast, and needs more memory" if less else "as fast, and not simpler"
    part, most = max(_differences(best.estimate.seconds, other.estimate.seconds), key=lambda item: item[1])
    through = f", mostly {_PARTS[part]} ({format_seconds(most)} more)" if most > 0 else ""
    return f"{share:.1%} slower{through}"


def _differences(best: Seconds, other: Seconds) -> Iterator[tuple[str, float]]:
    for field in fields(best):
        yield field.name, getattr(other, field.name) - getattr(best, field.name)


def _limit(estimate: Estimate) -> str:
    parts = {field.name: getattr(estimate.seconds, field.name) for field in fields(estimate.seconds)}
    name = max(parts, key=lambda part: parts[part])
    share = parts[name] / estimate.step_seconds
    return f"{_PARTS[name].capitalize()} takes {share:.0%} of the step: it is what limits this layout."


def _precision_note(situation: Situation) -> list[str]:
    if situation.limits.precision is not None:
        return []
    if situation.precision is Precision.BF16:
        return [
            "bf16 arithmetic with fp32 weights, as is usual on GPUs; --precision fp32 keeps full precision."
        ]
    faster = [name for name in ("bf16", "fp16") if name in situation.device.peak_flops_per_second]
    if faster:
        return [f"fp32 keeps full precision; --precision {faster[0]} would be faster and is lossy."]
    return []


def explain(plan: Plan) -> str:
    """Return the plan as plain text: the pick and why, the other candidates, what is excluded and why."""
    lines = [
        f"{plan.model.name}: {format_count(plan.model.parameters)} parameters on {plan.cluster.devices} x "
        f"{plan.cluster.kind}, batch {plan.batch_size}",
        "",
    ]
    if plan.best is None:
        lines += ["Nothing fits.", f"  {plan.smallest_change}"]
    else:
        lines += [f"Pick: {plan.best.name}", *(f"  {sentence}" for sentence in plan.best.why)]
        lines += ["", *_memory_lines(plan.best)]
    if plan.candidates:
        lines += ["", "Candidates", *(f"  {_row(candidate)}" for candidate in plan.candidates)]
    if plan.excluded:
        lines += ["", "Excluded", *(f"  {item.name}: {item.reason}" for item in plan.excluded)]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    lines += ["", f"{plan.searched} layouts in {format_seconds(plan.search_seconds)}"]
    return "\n".join(lines)


def _memory_lines(candidate: Candidate) -> list[str]:
    memory = candidate.estimate.memory_bytes
    names = ("parameters", "gradients", "optimizer", "activations", "communication", "other")
    parts = ", ".join(f"{name} {format_bytes(getattr(memory, name))}" for name in names)
    return [f"  Memory at the peak: {parts}"]


def _row(candidate: Candidate) -> str:
    estimate = candidate.estimate
    words = [
        f"{candidate.name:<28}",
        f"{format_seconds(estimate.step_seconds):>9}/step",
        f"{estimate.samples_per_second:>10.1f} samples/s",
        f"{format_bytes(estimate.memory_bytes.peak):>10}",
        f"mfu {estimate.mfu:.1%}",
    ]
    if not candidate.fits:
        words.append("does not fit")
    if candidate.activation_checkpointing is not Checkpointing.NONE:
        words.append(f"recompute {candidate.activation_checkpointing.value}")
    return "  ".join(words)
