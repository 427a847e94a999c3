"""What a run comes to: the headline in plain words, and what to do next."""

from __future__ import annotations

import math
from enum import Enum
from statistics import fmean, median

from ..records import Parity, ParityStatus, Report, StepRecord
from ..units import format_bytes, format_seconds
from .figures import describe_difference, format_error, format_loss, format_share, plural
from .wording import time_parts

# Fewer than this many steps say nothing about a trend.
_TREND_STEPS = 20
# Fewer settled steps than this do not contradict a prediction.
_TIMED_STEPS = 5
# A prediction is called off when a step takes this much longer or shorter.
_OFF = 0.25
# Exchange that is worth acting on, as a part of the step.
_EXCHANGE = 0.25


_PARITY_STEPS = {
    None: "Check the answer against one device: apportion verify with the same target and plan.",
    ParityStatus.EQUAL: "",
    ParityStatus.REFUSED: (
        "Check the answer on a smaller copy of the model: apportion verify with smaller --set dimensions."
    ),
    ParityStatus.WRONG: (
        "Do not use these weights. apportion verify with --strategy ddp tells whether another layout gives the "
        "answer of one device."
    ),
}


class Mood(Enum):
    """How the page greets its reader."""

    GOOD = "good"
    CAREFUL = "careful"
    BAD = "bad"


def settled(steps: tuple[StepRecord, ...]) -> tuple[StepRecord, ...]:
    """Return the steps without the first three (at most half), which warm caches and allocators up."""
    return steps[min(3, len(steps) // 2) :]


def median_seconds(steps: tuple[StepRecord, ...]) -> float:
    """Return the median step time after the warm-up; 0 where no step was made."""
    return median(record.seconds for record in settled(steps)) if steps else 0.0


def mood(report: Report) -> Mood:
    """Return whether the run can be trusted, needs a second look, or went wrong."""
    wrong = report.parity is not None and report.parity.status is ParityStatus.WRONG
    if wrong or first_not_finite(report.steps) is not None:
        return Mood.BAD
    unchecked = report.parity is None or report.parity.status is not ParityStatus.EQUAL
    return Mood.CAREFUL if unchecked or report.outcome != "done" or not report.steps else Mood.GOOD


def headline(report: Report) -> tuple[str, ...]:
    """Return sentences: what ran and on what, whether it was right, how fast, and what came of the loss."""
    return tuple(
        sentence
        for sentence in (
            _what_ran(report),
            describe_parity(report.parity) if report.steps or report.parity else "",
            _how_fast(report),
            _loss_sentence(report.steps),
        )
        if sentence
    )


def describe_parity(parity: Parity | None) -> str:
    """Return whether the first step gave the answer of one device, in a sentence."""
    if parity is None:
        return "Whether it gives the answer of one device was not checked."
    if parity.status is ParityStatus.REFUSED:
        return f"It could not be compared with one device: {parity.reason}."
    worst = largest_error(parity)
    tolerance = f"the tolerance is {parity.tolerance:.0e}"
    steps = "The first step gave" if parity.steps <= 1 else f"The first {parity.steps} steps gave"
    if parity.status is ParityStatus.EQUAL:
        return (
            f"{steps} the answer of one device: the largest relative error is {format_error(worst)}, "
            f"{tolerance}."
        )
    where = f" in {parity.worst.name} on rank {parity.worst.rank}" if parity.worst.name else ""
    reason = f" Found: {parity.reason.rstrip('.')}." if parity.reason else ""
    return (
        f"{steps} another answer than one device: the largest relative error is {format_error(worst)}{where}, "
        f"{tolerance}.{reason}"
    )


def largest_error(parity: Parity) -> float:
    """Return the largest relative error of any kind of tensor."""
    error = parity.relative_error
    return max(error.loss, error.gradients, error.weights, error.buffers, error.optimizer)


def first_not_finite(steps: tuple[StepRecord, ...]) -> StepRecord | None:
    """Return the first step whose loss is NaN or infinite."""
    return next((record for record in steps if not math.isfinite(record.loss)), None)


def exchange_share(report: Report) -> float:
    """Return the predicted part of a step in which ranks wait for one another's data."""
    best = report.plan.best
    if best is None or not best.estimate.step_seconds:
        return 0.0
    waits = [value for name, value in time_parts(best.estimate.seconds) if name.endswith("exchange")]
    return sum(waits) / best.estimate.step_seconds


def next_steps(report: Report) -> tuple[str, ...]:
    """Return what to do next, the most pressing first."""
    if report.plan.best is None:
        return (f"Change one thing and plan again: {report.plan.smallest_change or 'more memory or devices'}.",)
    found = [*_correctness_steps(report), *_prediction_steps(report), *_fit_steps(report)]
    if found:
        return tuple(found)
    return (
        "Nothing asks for a change. apportion compare runs the other strategies for a few steps, should you "
        "want the pick checked by measurement.",
    )


def _what_ran(report: Report) -> str:
    ranks = plural(report.world_size, "rank")
    if report.plan.best is None:
        return f"Nothing fits for {report.plan.model.name}, so it made no step."
    strategy = f" as {report.plan.best.name}"
    if not report.steps:
        return f"{report.plan.model.name} made no step on {ranks}{strategy}."
    first, last = report.steps[0].step, report.steps[-1].step
    span = f"{plural(last, 'step')}" if first == 1 else f"steps {first:,} to {last:,}"
    ended = "" if report.outcome == "done" else f" ({report.outcome})"
    return f"{report.plan.model.name} ran {span} on {ranks}{strategy}{ended}."


def _how_fast(report: Report) -> str:
    measured = report.measured_step_seconds
    if not measured:
        return ""
    words = f"A step took {format_seconds(measured)}"
    predicted = report.plan.best.estimate.step_seconds if report.plan.best else 0.0
    if not predicted:
        return f"{words}."
    difference = describe_difference(measured, predicted)
    return f"{words}, {difference} ({format_seconds(predicted)})."


def _loss_sentence(steps: tuple[StepRecord, ...]) -> str:
    broken = first_not_finite(steps)
    if broken is not None:
        return f"The loss became {broken.loss} at step {broken.step:,}."
    if len(steps) < 2:
        return f"The loss was {format_loss(steps[0].loss)}." if steps else ""
    start, end = steps[0].loss, steps[-1].loss
    verb = "fell" if end < start else "rose" if end > start else "stayed"
    return f"The loss {verb} from {format_loss(start)} to {format_loss(end)}."


def _correctness_steps(report: Report) -> list[str]:
    found = [_PARITY_STEPS[None if report.parity is None else report.parity.status]]
    broken = first_not_finite(report.steps) is not None
    if broken:
        found.append(
            "Resume from a checkpoint before the loss broke, with a lower learning rate, --clip-norm 1.0 or "
            "--precision fp32."
        )
    elif _loss_is_flat(report.steps):
        found.append("The loss does not fall. Look at the learning rate and at the data before the layout.")
    if report.outcome != "done" and mood(report) is not Mood.BAD:
        found.append("Continue with the same command; the run resumes from its last checkpoint.")
    return [text for text in found if text]


def _prediction_steps(report: Report) -> list[str]:
    best = report.plan.best
    if best is None or not report.measured_step_seconds or not best.estimate.step_seconds:
        return []
    if len(settled(report.steps)) < _TIMED_STEPS:
        return []
    ratio = report.measured_step_seconds / best.estimate.step_seconds
    if 1 / (1 + _OFF) <= ratio <= 1 + _OFF:
        return []
    return [
        "The prediction is off. apportion calibrate measures the devices and links here; plan again with the "
        "cluster.toml it writes."
    ]


def _fit_steps(report: Report) -> list[str]:
    found = []
    share = exchange_share(report)
    if share > _EXCHANGE:
        found.append(
            f"Ranks are predicted to wait for one another in {format_share(share)} of a step. A larger batch, "
            "more of it accumulated on each rank, makes that part smaller."
        )
    limit, peak = report.plan.cluster.device_memory_bytes, report.measured_peak_bytes
    if limit and peak > 0.92 * limit:
        found.append(
            f"Memory is nearly full: {format_bytes(peak)} of {format_bytes(limit)}. A smaller micro-batch or "
            "activation checkpointing leaves room."
        )
    return found


def _loss_is_flat(steps: tuple[StepRecord, ...]) -> bool:
    """Return whether the last quarter's mean loss is no lower than the first quarter's."""
    if len(steps) < _TREND_STEPS:
        return False
    quarter = len(steps) // 4
    return fmean(record.loss for record in steps[-quarter:]) >= fmean(record.loss for record in steps[:quarter])
