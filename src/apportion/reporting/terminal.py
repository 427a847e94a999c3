"""Plans, comparisons and checks as text for a terminal of 80 columns or more."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

from ..records import (
    Candidate,
    CheckStatus,
    CompareRow,
    Comparison,
    Excluded,
    MachineCheck,
    Parity,
    ParityStatus,
    Plan,
)
from ..units import format_bytes, format_seconds
from .figures import format_error, format_loss, format_rate, format_ratio, format_share
from .layout import Column, Sheet, align, bar, natural_width, paragraphs, wrap
from .wording import describe_model, describe_settings, format_cost, memory_parts, time_parts

SHOWN_CANDIDATES = 12
FREE = "free"
_PARITY_STYLE = {ParityStatus.EQUAL: "green", ParityStatus.REFUSED: "yellow", ParityStatus.WRONG: "bold red"}
_CHECK_STYLE = {CheckStatus.OK: "green", CheckStatus.WARNING: "yellow", CheckStatus.PROBLEM: "bold red"}
_CHECK_MARK = {CheckStatus.OK: "✓", CheckStatus.WARNING: "!", CheckStatus.PROBLEM: "✗"}


def plan_table(plan: Plan) -> Sheet:
    """Return the candidates with their memory, time and cost, the pick marked, and what is not offered.

    Where the terminal is too narrow for one line per candidate, its settings go on a second one.
    """

    def draw(width: int) -> list[Text]:
        searched = f"{plan.searched:,} layouts searched in {format_seconds(plan.search_seconds)}"
        head = wrap(describe_model(plan), width=width, style="bold")
        head += [Text(searched, style="dim")] if plan.searched else []
        return list(
            paragraphs(
                head,
                _candidate_lines(plan, width),
                _verdict_lines(plan, width),
                _excluded_lines(plan.excluded, width),
                [line for text in plan.warnings for line in _bullet(text, width, "yellow", mark="! ")],
            )
        )

    return Sheet(draw)


def explain_bars(candidate: Candidate, limit_bytes: int) -> Sheet:
    """Return the memory of the fullest rank and the time of a step, by part.

    `limit_bytes` is what one device may use; 0 leaves it out, and the bars are parts of the peak.
    """

    def draw(width: int) -> list[Text]:
        estimate = candidate.estimate
        peak = estimate.memory_bytes.peak
        of = f" of {format_bytes(limit_bytes)}" if limit_bytes else ""
        memory = [
            (name, format_bytes(value), value / max(limit_bytes or peak, 1))
            for name, value in memory_parts(estimate.memory_bytes)
            if value
        ]
        if limit_bytes > peak:
            memory.append((FREE, format_bytes(limit_bytes - peak), 1 - peak / limit_bytes))
        total = estimate.step_seconds
        times = [
            (name, format_seconds(value), value / total)
            for name, value in time_parts(estimate.seconds)
            if value and total
        ]
        return list(
            paragraphs(
                [
                    Text(
                        f"{candidate.name}: memory of rank {estimate.memory_bytes.peak_rank} at its peak, "
                        f"{format_bytes(peak)}{of}",
                        style="bold",
                    ),
                    *_bar_lines(memory, width),
                ],
                [
                    Text(f"{candidate.name}: one step, {format_seconds(total)}", style="bold"),
                    *_bar_lines(times, width),
                ],
            )
        )

    return Sheet(draw)


def compare_table(comparison: Comparison) -> Sheet:
    """Return every strategy, predicted beside measured, the fastest measured, and the regret of the pick."""
    columns = [
        Column("strategy", right=False), Column("step"), Column("predicted"), Column("ratio"),
        Column("peak"), Column("predicted"), Column("loss"),
    ]  # fmt: skip

    def draw(width: int) -> list[Text]:
        ran = [row for row in comparison.rows if not row.reason]
        rows = [_compare_cells(row, comparison) for row in ran]
        table = align(columns, rows, width=width) if rows else []
        failed = [
            line for row in comparison.rows if row.reason for line in _named(row.strategy, row.reason, width)
        ]
        return list(
            paragraphs(
                table,
                [Text("not run", style="bold"), *failed] if failed else [],
                wrap(_regret_sentence(comparison), width=width, style="bold"),
            )
        )

    return Sheet(draw)


def parity_table(parities: Sequence[Parity]) -> Sheet:
    """Return the comparisons with one device: status, error per kind of tensor, and what is wrong."""
    columns = [
        Column("strategy", right=False), Column("ranks"), Column("answer", right=False), Column("loss"),
        Column("gradients"), Column("weights"), Column("buffers"), Column("optimizer"),
    ]  # fmt: skip

    def draw(width: int) -> list[Text]:
        table = align(columns, [_parity_cells(parity) for parity in parities], width=width)
        lines = table[:1]
        for line, parity in zip(table[1:], parities, strict=True):
            lines += [line, *_parity_reason(parity, width)]
        return lines

    return Sheet(draw)


def doctor_table(checks: Sequence[MachineCheck]) -> Sheet:
    """Return the checks of this machine, the fix below each that is not ok."""

    def draw(width: int) -> list[Text]:
        size = max([len(check.name) for check in checks], default=0)
        lines: list[Text] = []
        for check in checks:
            first = f"{_CHECK_MARK[check.status]} {check.name.ljust(size)}  "
            style = _CHECK_STYLE[check.status]
            lines += wrap(check.found, width=width, indent=" " * len(first), first=first, style=style)
            if check.fix and check.status is not CheckStatus.OK:
                indent = " " * (size + 4)
                lines += wrap(check.fix, width=width, indent=f"{indent}     ", first=f"{indent}try: ")
        return list(paragraphs(lines, [Text(_doctor_verdict(checks), style="bold")]))

    return Sheet(draw)


def _candidate_lines(plan: Plan, width: int) -> list[Text]:
    shown = plan.candidates[:SHOWN_CANDIDATES]
    if not shown:
        return []
    wide = _candidate_columns(plan, settings=True)
    rows = [_candidate_cells(candidate, plan, settings=True, bar_size=16) for candidate in shown]
    hidden = len(plan.candidates) - len(shown)
    more = [Text(f"  and {hidden} more", style="dim")] if hidden else []
    if natural_width(wide, rows) <= width:
        return align(wide, rows, width=width) + more
    narrow = _candidate_columns(plan, settings=False)
    rows = [_candidate_cells(candidate, plan, settings=False, bar_size=8) for candidate in shown]
    table = align(narrow, rows, width=width)
    lines = table[:1]
    for line, candidate in zip(table[1:], shown, strict=True):
        cost = candidate.estimate.cost_per_million_tokens
        text = describe_settings(candidate)
        text += "" if cost is None else f", {format_cost(cost)}/M tokens"
        lines += [line, *wrap(text, width=width, indent="    ", style="dim")]
    return lines + more


def _candidate_columns(plan: Plan, *, settings: bool) -> list[Column]:
    columns = [Column("  plan", right=False)]
    if settings:
        columns += [
            Column("micro-batch"), Column("accumulated"), Column("checkpointing", right=False),
            Column("precision", right=False),
        ]  # fmt: skip
    limit = plan.cluster.device_memory_bytes
    memory = f"memory of {format_bytes(limit)}" if limit else "memory"
    columns += [Column(memory, right=False), Column("step"), Column("samples/s")]
    columns += [Column("tokens/s")] if _has_tokens(plan) else []
    columns += [Column("MFU")]
    columns += [Column("$/M tokens")] if settings and _has_cost(plan) else []
    return columns


def _candidate_cells(candidate: Candidate, plan: Plan, *, settings: bool, bar_size: int) -> list[Text]:
    estimate = candidate.estimate
    picked = candidate == plan.best
    cells = [Text(f"{'▶' if picked else ' '} {candidate.name}", style="bold green" if picked else "")]
    if settings:
        cells += [
            Text(f"{candidate.micro_batch_size:,}"),
            Text(f"{candidate.grad_accumulation:,}"),
            Text(candidate.activation_checkpointing.value),
            Text(candidate.precision.value),
        ]
    cells += [
        _memory_cell(candidate, plan, bar_size),
        Text(format_seconds(estimate.step_seconds)),
        Text(format_rate(estimate.samples_per_second)),
    ]
    cells += [Text(format_rate(estimate.tokens_per_second))] if _has_tokens(plan) else []
    cells += [Text(format_share(estimate.mfu) if estimate.mfu else "-")]
    if settings and _has_cost(plan):
        cells.append(Text(format_cost(estimate.cost_per_million_tokens)))
    return cells


def _memory_cell(candidate: Candidate, plan: Plan, size: int) -> Text:
    """Return the bar and the peak; without a device limit the bar is against the largest candidate."""
    peak = candidate.estimate.memory_bytes.peak
    largest = max(other.estimate.memory_bytes.peak for other in plan.candidates)
    fraction = peak / max(plan.cluster.device_memory_bytes or largest, 1)
    style = "red" if not candidate.fits else "yellow" if fraction > 0.9 else "green"
    return Text.assemble((bar(fraction, size=size), style), f" {format_bytes(peak):>10}")


def _verdict_lines(plan: Plan, width: int) -> list[Text]:
    if plan.best is None:
        lines = [Text("Nothing fits.", style="bold red")]
        if plan.smallest_change:
            lines += wrap(f"The smallest change that would: {plan.smallest_change}", width=width)
        return lines
    lines = [Text(f"why {plan.best.name}", style="bold")]
    lines += [line for text in plan.best.why for line in _bullet(text, width)]
    if not plan.best.why:
        lines = []
    # The pick's own reasons may already say why the next ones lost.
    told = [text.split(":")[0] for text in plan.best.why]
    others = [item for item in plan.candidates if item != plan.best and item.name not in told][:2]
    for other in others:
        lines += [line for text in other.why[:1] for line in _named(f"not {other.name}", text, width)]
    return lines


def _excluded_lines(excluded: Sequence[Excluded], width: int) -> list[Text]:
    lines = []
    for item in excluded:
        short = f" ({format_bytes(item.short_by_bytes)} short)" if item.short_by_bytes else ""
        try_ = f"; try {item.try_}" if item.try_ else ""
        lines += _named(item.name, f"{item.reason}{short}{try_}", width)
    return [Text("not offered", style="bold"), *lines] if lines else []


def _bar_lines(rows: Sequence[tuple[str, str, float]], width: int) -> list[Text]:
    names = max([len(name) for name, _, _ in rows], default=0)
    size = max(10, min(40, width - names - 26))
    return [
        Text.assemble(
            f"  {name.ljust(names)}  ",
            (" " * size if name == FREE else bar(fraction, size=size), "cyan"),
            f"  {value:>10}  {format_share(fraction):>6}",
        )
        for name, value, fraction in rows
    ]


def _compare_cells(row: CompareRow, comparison: Comparison) -> list[Text]:
    mark = "▶ " if row.strategy == comparison.pick else "  "
    style = "bold green" if row.strategy == comparison.best else ""
    predicted_bytes = row.predicted_peak_bytes
    return [
        Text(f"{mark}{row.strategy}", style=style),
        Text(format_seconds(row.measured_step_seconds)),
        Text(format_seconds(row.predicted_step_seconds) if row.predicted_step_seconds else "-"),
        Text(format_ratio(row.ratio)),
        Text(format_bytes(row.measured_peak_bytes)),
        Text(format_bytes(predicted_bytes) if predicted_bytes else "-"),
        Text(format_loss(row.loss)),
    ]


def _regret_sentence(comparison: Comparison) -> str:
    if not comparison.best:
        return "No strategy ran."
    if math.isnan(comparison.regret):
        return f"The fastest measured is {comparison.best}; the pick, {comparison.pick}, was not measured."
    if comparison.pick == comparison.best:
        return f"The pick, {comparison.pick}, is the fastest measured."
    return (
        f"The pick, {comparison.pick}, takes {format_share(comparison.regret)} longer a step than the fastest "
        f"measured, {comparison.best}."
    )


def _parity_cells(parity: Parity) -> list[Text]:
    error = parity.relative_error
    known = parity.status is not ParityStatus.REFUSED
    values = (error.loss, error.gradients, error.weights, error.buffers, error.optimizer)
    return [
        Text(parity.strategy),
        Text(str(parity.world_size)),
        Text(parity.status.value, style=_PARITY_STYLE[parity.status]),
        *(Text(format_error(value) if known else "-") for value in values),
    ]


def _parity_reason(parity: Parity, width: int) -> list[Text]:
    lines = []
    if parity.status is ParityStatus.WRONG and parity.worst.name:
        text = f"worst: {parity.worst.name} on rank {parity.worst.rank} (tolerance {parity.tolerance:.0e})"
        lines += wrap(text, width=width, indent="    ", style="red")
    if parity.reason:
        lines += wrap(parity.reason, width=width, indent="    ", style="dim")
    return lines


def _doctor_verdict(checks: Sequence[MachineCheck]) -> str:
    problems = sum(check.status is CheckStatus.PROBLEM for check in checks)
    warnings = sum(check.status is CheckStatus.WARNING for check in checks)
    if not problems and not warnings:
        return "Nothing stands in the way."
    return f"{problems} to mend, {warnings} to know about." if problems else f"{warnings} to know about."


def _named(name: str, text: str, width: int) -> list[Text]:
    """Return a name and a sentence, the sentence's later lines under its start."""
    first = f"  {name.ljust(10)}  "
    return wrap(text, width=width, indent=" " * min(len(first), 14), first=first)


def _bullet(text: str, width: int, style: str = "", *, mark: str = "- ") -> list[Text]:
    return wrap(text, width=width, indent="    ", first=f"  {mark}", style=style)


def _has_tokens(plan: Plan) -> bool:
    return any(candidate.estimate.tokens_per_second for candidate in plan.candidates)


def _has_cost(plan: Plan) -> bool:
    return any(candidate.estimate.cost_per_million_tokens is not None for candidate in plan.candidates)
