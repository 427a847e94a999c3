"""One run as one self-contained HTML page."""

from __future__ import annotations

import math
import os
from importlib.resources import files
from pathlib import Path

from ..records import ParityStatus, Report, StepRecord
from ..units import format_bytes, format_seconds
from .charts import Reference, Series, line_chart
from .figures import format_error, format_loss, format_rate, format_share
from .markup import Html, element, join, table
from .plan_page import excluded_section, plan_section, prediction_section
from .runs import read_run
from .verdict import Mood, describe_parity, headline, largest_error, median_seconds, mood, next_steps, settled
from .wording import describe_model

_SHOWN_ROWS = 40
_BADGE = {Mood.GOOD: "✓ All good", Mood.CAREFUL: "! Look twice", Mood.BAD: "✗ Went wrong"}
_ANSWER = {ParityStatus.EQUAL: "equal", ParityStatus.REFUSED: "refused", ParityStatus.WRONG: "wrong"}


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into the run directory and return its path; an older one stays until it is whole.

    Raises: OptionError if the directory holds no run or a file of it cannot be read.
    """
    path = run_dir / "report.html"
    beside = run_dir / "report.html.new"
    beside.write_text(render(read_run(run_dir)), encoding="utf-8")
    os.replace(beside, path)
    return path


def render(report: Report) -> str:
    """Return the page. It fetches nothing, and every text of the user's is escaped."""
    title = f"{report.name} · {report.plan.model.name}"
    style = (files(__package__) / "report.css").read_text(encoding="utf-8")
    sections = [
        ("next", "What to do next", _next_section(report)),
        ("curves", "How it went", _curves_section(report)),
        ("validation", "Validation", _validation_section(report)),
        ("prediction", "Predicted beside measured", prediction_section(report)),
        ("plan", "The plan, and why", plan_section(report.plan)),
        ("excluded", "What was not offered", excluded_section(report.plan)),
        ("parity", "The answer of one device", _parity_section(report)),
        ("notes", "Notes", _list(report.notes)),
        ("job", "The job", _job_section(report)),
    ]
    shown = [(key, name, body) for key, name, body in sections if body]
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", title),
        element("style", Html(style)),
    )
    body = element(
        "body",
        _header(report),
        element("nav", *(element("a", name, href=f"#{key}") for key, name, _ in shown), aria_label="Sections"),
        element("main", *(_section(key, name, content) for key, name, content in shown)),
        element("footer", "Written by apportion from the files of the run directory."),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _header(report: Report) -> Html:
    state = mood(report)
    badge = element("span", _BADGE[state], class_=f"badge {state.value}")
    first, *rest = headline(report)
    return element(
        "header",
        element("p", f"run {report.name}", class_="kicker"),
        element("div", element("h1", report.plan.model.name), badge, class_="top"),
        element("p", element("strong", first), " " + " ".join(rest), class_="lead"),
        element("p", describe_model(report.plan), class_="about"),
        element("dl", *_tiles(report), class_="tiles"),
    )


def _tiles(report: Report) -> list[Html]:
    parity = report.parity
    answer = "not checked" if parity is None else _ANSWER[parity.status]
    compared = parity is not None and parity.status is not ParityStatus.REFUSED
    error = f"largest error {format_error(largest_error(parity))}" if parity is not None and compared else ""
    tiles = [_tile("Answer of one device", answer, error)]
    steps, best = settled(report.steps), report.plan.best
    if steps:
        step = report.measured_step_seconds or median_seconds(report.steps)
        predicted = f"{format_seconds(best.estimate.step_seconds)} predicted" if best else ""
        tiles.append(_tile("Step time", format_seconds(step), predicted))
        seconds = sum(record.seconds for record in steps)
        rate = sum(record.samples for record in steps) / seconds if seconds else 0.0
        tokens = sum(record.tokens_per_second * record.seconds for record in steps) / (seconds or 1.0)
        below = f"{format_rate(tokens)} tokens/s" if tokens else ""
        tiles.append(_tile("Samples per second", format_rate(rate), below))
    if report.measured_peak_bytes:
        limit = report.plan.cluster.device_memory_bytes
        below = f"of {format_bytes(limit)} on each device" if limit else "on the fullest rank"
        tiles.append(_tile("Peak memory", format_bytes(report.measured_peak_bytes), below))
    if report.steps:
        mfu = [record.mfu for record in steps if record.mfu]
        below = f"{format_share(sum(mfu) / len(mfu))} of the device peak" if mfu else ""
        tiles.append(_tile("Last loss", format_loss(report.steps[-1].loss), f"step {report.steps[-1].step:,}"))
        tiles += [_tile("Model FLOPs", below.split(" ")[0], "of the device peak")] if mfu else []
    return tiles


def _tile(name: str, value: str, below: str) -> Html:
    return element("div", element("dt", name), element("dd", value, element("small", below)))


def _section(key: str, name: str, content: Html) -> Html:
    return element(
        "section", element("h2", name, id=f"{key}-title"), content, id=key, aria_labelledby=f"{key}-title"
    )


def _list(texts: tuple[str, ...]) -> Html:
    return element("ul", *(element("li", text) for text in texts), class_="plain") if texts else Html("")


def _next_section(report: Report) -> Html:
    return _list(next_steps(report))


def _curves_section(report: Report) -> Html:
    steps = report.steps
    if not steps:
        return element("p", "No step was made, so there is nothing to draw.")
    losses = [Series(name="training", points=tuple((float(r.step), r.loss) for r in steps))]
    validation = tuple((float(step), value) for step, name, value in report.validation if name == "loss")
    losses += [Series(name="validation", points=validation, dots=True)] if validation else []
    charts = [
        line_chart("Loss", losses),
        _time_chart(report),
        _simple_chart("Learning rate", [(r.step, r.lr) for r in steps], zero=True),
    ]
    norms = [(r.step, r.grad_norm) for r in steps]
    if any(math.isfinite(norm) for _, norm in norms):
        charts.append(_simple_chart("Gradient norm before clipping", norms, zero=True))
    return join([element("div", *charts, class_="charts"), _steps_table(steps)])


def _simple_chart(title: str, points: list[tuple[int, float]], *, zero: bool) -> Html:
    series = Series(name=title.lower(), points=tuple((float(x), y) for x, y in points))
    return line_chart(title, [series], zero=zero)


def _time_chart(report: Report) -> Html:
    typical = median_seconds(report.steps)
    scale, unit = (1.0, "s") if typical >= 1 else (1e3, "ms") if typical >= 1e-3 else (1e6, "µs")
    best = report.plan.best
    predicted = best.estimate.step_seconds * scale if best else 0.0
    near = predicted and predicted < 2 * typical * scale
    return line_chart(
        "Step time",
        [Series(name="measured", points=tuple((float(r.step), r.seconds * scale) for r in report.steps))],
        unit=unit,
        reference=Reference(name="predicted", value=predicted) if near else None,
        cap=2 * typical * scale,
        zero=True,
    )


def _steps_table(steps: tuple[StepRecord, ...]) -> Html:
    rows = [
        (
            f"{r.step:,}", f"{r.epoch:,}", format_loss(r.loss), f"{r.grad_norm:.4f}", f"{r.lr:.3g}",
            format_seconds(r.seconds), f"{r.samples:,}", format_bytes(r.memory),
        )
        for r in _sample(steps)
    ]  # fmt: skip
    headings = ("step", "epoch", "loss", "gradient norm", "learning rate", "time", "samples", "memory")
    caption = "All steps" if len(rows) == len(steps) else f"{len(rows)} of {len(steps):,} steps"
    content = table(headings, rows, caption=caption, text_columns=frozenset())
    return element("details", element("summary", f"The numbers ({caption.lower()})"), content)


def _sample(steps: tuple[StepRecord, ...]) -> list[StepRecord]:
    """Return at most `_SHOWN_ROWS` steps, evenly spread, the first and the last among them."""
    if len(steps) <= _SHOWN_ROWS:
        return list(steps)
    last = len(steps) - 1
    return [steps[round(i * last / (_SHOWN_ROWS - 1))] for i in range(_SHOWN_ROWS)]


def _validation_section(report: Report) -> Html:
    if not report.validation:
        return Html("")
    names = sorted({name for _, name, _ in report.validation}, key=lambda name: (name != "loss", name))
    found = {(step, name): value for step, name, value in report.validation}
    rows = [
        (f"{step:,}", *(format_loss(found[step, name]) if (step, name) in found else "-" for name in names))
        for step in sorted({step for step, _, _ in report.validation})
    ]
    return table(("step", *names), rows, caption="Validation metrics by step", text_columns=frozenset())


def _parity_section(report: Report) -> Html:
    parity = report.parity
    sentence = element("p", describe_parity(parity))
    if parity is None or parity.status is ParityStatus.REFUSED:
        return join([sentence, _list(parity.notes) if parity else ""])
    error = parity.relative_error
    rows = [
        (name, format_error(value), "within" if value <= parity.tolerance else "above")
        for name, value in (
            ("loss", error.loss),
            ("gradients", error.gradients),
            ("weights", error.weights),
            ("buffers", error.buffers),
            ("optimizer state", error.optimizer),
        )
    ]
    headings = ("kind", "largest relative error", f"against {parity.tolerance:.0e}")
    content = table(headings, rows, caption="Errors against one device", text_columns=frozenset({0, 2}))
    return join([sentence, content, _list(parity.notes)])


def _job_section(report: Report) -> Html:
    job = report.job
    if job is None:
        return Html("")
    rows = [
        ("target", job.target), ("devices", job.devices), ("plan", job.plan), ("engine", job.engine),
        ("global batch", f"{job.batch_size:,} samples"),
        ("length", f"{job.steps:,} steps" if job.steps is not None else f"{job.epochs:,} epochs"),
        ("optimizer", job.optimizer), ("seed", str(job.seed)),
        ("clip norm", "none" if job.clip_norm is None else f"{job.clip_norm:g}"),
        *((f"--set {name}", value) for name, value in sorted(job.overrides.items())),
        *sorted(job.versions.items()),
    ]  # fmt: skip
    return table(("option", "value"), rows, caption="Resolved options", text_columns=frozenset({0, 1}))
