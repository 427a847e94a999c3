"""The parts of the page that show a plan."""

from __future__ import annotations

import re

from ..records import Candidate, Excluded, Plan, Report
from ..units import format_bytes, format_seconds
from .charts import pair_of_bars, stacked_bar
from .figures import describe_difference, format_rate, format_share, plural
from .markup import Html, element, join, table
from .placement import holdings, placement_picture
from .verdict import settled
from .wording import (
    describe_checkpointing,
    describe_mesh,
    describe_settings,
    format_cost,
    memory_parts,
    time_parts,
)

_PICTURE_WIDTH = 92
_FILLED = re.compile("([█▒]+)")


def plan_section(plan: Plan) -> Html:
    """Return the pick with its reasons, where it puts what, its memory and time by part, and the others."""
    if plan.best is None:
        change = f" The smallest change that would: {plan.smallest_change}." if plan.smallest_change else ""
        return element("p", f"Nothing fits.{change}")
    best = plan.best
    about = f"{best.name}: {describe_mesh(best.mesh)}, {describe_settings(best)}."
    reasons = (
        element("ul", *(element("li", text) for text in best.why), class_="plain") if best.why else Html("")
    )
    return join(
        [
            element("p", about),
            reasons,
            element("div", _memory_card(plan, best), _time_card(best), class_="charts"),
            _placement(best),
            element("h3", "The candidates"),
            _candidates(plan),
        ]
    )


def excluded_section(plan: Plan) -> Html:
    """Return the strategies that were not offered, with the reasons; empty where all were."""
    if not plan.excluded:
        return Html("")
    return element("ul", *(_excluded_item(item) for item in plan.excluded), class_="plain")


def _excluded_item(item: Excluded) -> Html:
    short = f" ({format_bytes(item.short_by_bytes)} short)" if item.short_by_bytes else ""
    try_ = f". What would help: {item.try_}" if item.try_ else ""
    return element("li", element("strong", f"{item.name}: "), f"{item.reason}{short}{try_}")


def prediction_section(report: Report) -> Html:
    """Return step time, memory and speed, predicted beside measured; empty without steps or a pick."""
    best = report.plan.best
    if best is None or not report.steps:
        return Html("")
    estimate, steps = best.estimate, settled(report.steps)
    measured, peak = report.measured_step_seconds, report.measured_peak_bytes
    predicted_peak = estimate.memory_bytes.peak
    limit = report.plan.cluster.device_memory_bytes
    seconds = sum(record.seconds for record in steps)
    rate = sum(record.samples for record in steps) / seconds if seconds else 0.0
    of = f" of {format_bytes(limit)}" if limit else ""
    speed = estimate.samples_per_second
    cards = [
        _pair(
            "Step time",
            (estimate.step_seconds, format_seconds(estimate.step_seconds)),
            (measured, format_seconds(measured)),
            words=("longer", "shorter"),
        ),
        _pair(
            f"Peak memory{of}",
            (float(predicted_peak), format_bytes(predicted_peak)),
            (float(peak), format_bytes(peak)),
            words=("more", "less"),
            whole=float(limit),
        ),
        _pair(
            "Samples per second",
            (speed, format_rate(speed)),
            (rate, format_rate(rate)),
            words=("more", "fewer"),
        ),
    ]
    warm_up = len(report.steps) - len(steps)
    after = f" after the first {warm_up}" if warm_up else ""
    note = f"Measured: the median of {plural(len(steps), 'step')}{after}, and the highest peak of any rank."
    return join([element("div", *cards, class_="charts three"), element("p", note, class_="note")])


def _pair(
    title: str,
    predicted: tuple[float, str],
    measured: tuple[float, str],
    *,
    words: tuple[str, str],
    whole: float = 0.0,
) -> Html:
    rows = [("predicted", *predicted), ("measured", *measured)]
    known = predicted[0] > 0 and measured[0] > 0
    more, less = words
    below = describe_difference(measured[0], predicted[0], more=more, less=less) if known else ""
    return element(
        "figure",
        element("figcaption", title),
        pair_of_bars(rows, label=f"{title}, predicted and measured", whole=whole),
        element("p", below, class_="note"),
    )


def _memory_card(plan: Plan, candidate: Candidate) -> Html:
    memory = candidate.estimate.memory_bytes
    limit = plan.cluster.device_memory_bytes
    parts = [(name, float(value), format_bytes(value)) for name, value in memory_parts(memory) if value]
    of = f" of {format_bytes(limit)}" if limit else ""
    title = f"Memory of rank {memory.peak_rank} at its peak: {format_bytes(memory.peak)}{of}"
    bar = stacked_bar(parts, whole=float(limit or memory.peak), label=title)
    return element("figure", element("figcaption", title), bar)


def _time_card(candidate: Candidate) -> Html:
    estimate = candidate.estimate
    parts = [(name, value, format_seconds(value)) for name, value in time_parts(estimate.seconds) if value]
    title = f"One step: {format_seconds(estimate.step_seconds)}"
    bar = stacked_bar(parts, whole=estimate.step_seconds, label=title)
    return element("figure", element("figcaption", title), bar)


def _placement(candidate: Candidate) -> Html:
    words = "; ".join(f"{item.name}: {item.words}" for item in holdings(candidate))
    pieces = _FILLED.split(placement_picture(candidate).text(_PICTURE_WIDTH))
    # Every second piece is a filled run.
    drawn = [element("b", piece) if i % 2 else piece for i, piece in enumerate(pieces)]
    picture = element("pre", *drawn, role="img", aria_label=words)
    caption = element("figcaption", "Which rank holds what")
    return element("figure", caption, element("div", picture, class_="scroll", tabindex="0"), class_="wide")


def _candidates(plan: Plan) -> Html:
    rows = []
    for candidate in plan.candidates:
        estimate = candidate.estimate
        name: str = candidate.name
        if candidate == plan.best:
            name = join([element("strong", name), element("span", "pick", class_="badge good")])
        rows.append(
            (
                name,
                f"{candidate.micro_batch_size:,} x {candidate.grad_accumulation:,}",
                describe_checkpointing(candidate.activation_checkpointing),
                candidate.precision.value,
                format_bytes(estimate.memory_bytes.peak),
                format_seconds(estimate.step_seconds),
                format_rate(estimate.samples_per_second),
                format_rate(estimate.tokens_per_second) if estimate.tokens_per_second else "-",
                format_share(estimate.mfu) if estimate.mfu else "-",
                format_cost(estimate.cost_per_million_tokens),
            )
        )
    headings = (
        "plan", "micro-batch", "activations", "precision", "memory", "step", "samples/s", "tokens/s", "MFU",
        "$/M tokens",
    )  # fmt: skip
    content = table(headings, rows, caption="Candidates", text_columns=frozenset({0, 2, 3}))
    return join([content, _why_not(plan)])


def _why_not(plan: Plan) -> Html:
    items = [
        element("li", element("strong", f"not {other.name}: "), other.why[0])
        for other in plan.candidates
        if other != plan.best and other.why
    ]
    return element("ul", *items, class_="plain after") if items else Html("")
