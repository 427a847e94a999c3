"""Charts as inline SVG, without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .figures import format_share
from .markup import Html, element, join

WIDTH, HEIGHT = 460, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 20, 14, 26
MAX_POINTS = 500

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line of points; `dots` draws the points alone. Points that are not finite interrupt the line."""

    name: str
    points: tuple[Point, ...]
    dots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A horizontal line at `value`."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class Frame:
    """The ranges of both axes and where they lie in the picture."""

    left: float
    right: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.left) / (self.right - self.left) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        inner = HEIGHT - _TOP - _BOTTOM
        return _TOP + inner - (min(value, self.high) - self.low) / (self.high - self.low) * inner


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    unit: str = "",
    reference: Reference | None = None,
    cap: float | None = None,
    zero: bool = False,
) -> Html:
    """Return a figure with one line per series over the steps, or a note where there is nothing to draw.

    Values above `cap` are drawn at the upper edge and counted below the chart. `zero` starts the axis at 0.
    """
    finite = [point for line in series for point in line.points if math.isfinite(point[1])]
    broken = [point for line in series for point in line.points if not math.isfinite(point[1])]
    if not finite:
        return element("figure", element("figcaption", title), element("p", "No finite values to draw."))
    above = [y for _, y in finite if cap is not None and y > cap]
    span = [x for x, _ in (*finite, *broken)]
    frame = _frame(finite, span=span, cap=cap, zero=zero, reference=reference)
    description = _description(series[0], unit)
    drawing = element(
        "svg",
        element("title", title),
        element("desc", description),
        *_axes(frame),
        *_reference(frame, reference),
        *(part for i, line in enumerate(series) for part in _draw(frame, line, i)),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{title}: {description}",
    )
    notes = [f"{len(above)} above the chart, up to {max(above):.4g} {unit}".rstrip()] if above else []
    notes += [f"{len(broken):,} not finite, the first at step {broken[0][0]:,.0f}"] if broken else []
    heading = [element("span", title), element("span", f" {unit}", class_="unit")]
    return element(
        "figure",
        element("figcaption", *heading),
        drawing,
        _legend(series, reference),
        element("p", "; ".join(notes), class_="note") if notes else Html(""),
    )


def stacked_bar(parts: Sequence[tuple[str, float, str]], *, whole: float, label: str) -> Html:
    """Return one bar of named parts (name, amount, amount in words) against `whole`, and its legend."""
    position = 0.0
    rects, items = [], []
    scale = 100 / max(whole, sum(amount for _, amount, _ in parts), 1e-300)
    for i, (name, amount, words) in enumerate(parts):
        size = amount * scale
        tip = element("title", f"{name}: {words}")
        shape = element("rect", x=position, y=0, width=max(size, 0.15), height=10, class_=f"fill{i % 8}")
        rects.append(element("g", tip, shape))
        position += size
        share = format_share(amount / whole) if whole else "-"
        items.append(_legend_item(f"fill{i % 8}", name, words, share))
    bar = element(
        "svg",
        element("title", label),
        element("rect", x=0, y=0, width=100, height=10, class_="track"),
        *rects,
        viewBox="0 0 100 10",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"{label}: " + ", ".join(f"{name} {words}" for name, _, words in parts),
        class_="bar",
    )
    return join([bar, element("ul", *items, class_="legend parts")])


def pair_of_bars(rows: Sequence[tuple[str, float, str]], *, label: str, whole: float = 0.0) -> Html:
    """Return bars below one another (name, amount, amount in words) on one scale, up to `whole` if given."""
    largest = max([whole, *(amount for _, amount, _ in rows)], default=0.0) or 1.0
    lines = []
    for i, (name, amount, words) in enumerate(rows):
        drawing = element(
            "svg",
            element("title", f"{name}: {words}"),
            element("rect", x=0, y=0, width=100, height=10, class_="track"),
            element("rect", x=0, y=0, width=100 * amount / largest, height=10, class_=f"pair{i % 2}"),
            viewBox="0 0 100 10",
            preserveAspectRatio="none",
            role="img",
            aria_label=f"{name}: {words}",
            class_="thin",
        )
        lines += [element("span", name), drawing, element("span", words, class_="number")]
    return element("div", *lines, class_="pair", role="group", aria_label=label)


def thin_out(points: Sequence[Point], limit: int = MAX_POINTS) -> list[Point]:
    """Return at most about `limit` points that keep the lowest and highest of every stretch."""
    if len(points) <= limit:
        return list(points)
    kept: list[Point] = []
    size = math.ceil(2 * len(points) / limit)
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        broken = next((point for point in stretch if not math.isfinite(point[1])), None)
        finite = [point for point in stretch if math.isfinite(point[1])] or [stretch[0]]
        chosen = {min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])}
        kept += sorted([*chosen, broken] if broken else chosen, key=lambda p: p[0])
    if kept[-1][0] != points[-1][0]:
        kept.append(points[-1])
    return kept


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round values that lie in [low, high]."""
    raw = (high - low) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{i * step:.15g}") for i in range(first, last + 1)]


def label_ticks(values: Sequence[float]) -> list[str]:
    """Return the values with six digits, or with as many as tell them apart."""
    texts: list[str] = []
    for digits in range(6, 17):
        texts = [f"{value:.{digits}g}" for value in values]
        if len(set(texts)) == len(texts):
            break
    return texts


def _frame(
    points: Sequence[Point],
    *,
    span: Sequence[float],
    cap: float | None,
    zero: bool,
    reference: Reference | None,
) -> Frame:
    ys = [min(y, cap) if cap is not None else y for _, y in points]
    ys += [reference.value] if reference else []
    low, high = (0.0 if zero else min(ys)), max(ys)
    if high - low <= 1e-12 * max(abs(high), abs(low)):
        margin = abs(high) * 0.1 or 1.0
        low, high = (low if zero and low < high else low - margin), high + margin
    room = 0.06 * (high - low)
    left, right = min(span), max(span)
    if left == right:
        left, right = left - 1, right + 1
    return Frame(left, right, low if zero else low - room, high + room)


def _axes(frame: Frame) -> list[Html]:
    parts = []
    values = ticks(frame.low, frame.high)
    for value, label in zip(values, label_ticks(values), strict=True):
        y = frame.y(value)
        parts.append(element("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(element("text", label, x=_LEFT - 7, y=y + 4, class_="tick", text_anchor="end"))
    for value in ticks(frame.left, frame.right):
        if value == int(value):
            x = frame.x(value)
            base = HEIGHT - _BOTTOM
            parts.append(element("line", x1=x, x2=x, y1=base, y2=base + 4, class_="axis"))
            label = f"{int(value):,}"
            parts.append(element("text", label, x=x, y=base + 17, class_="tick", text_anchor="middle"))
    base = HEIGHT - _BOTTOM
    parts.append(element("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=base, y2=base, class_="axis"))
    parts.append(element("text", "step", x=_LEFT - 7, y=base + 17, class_="tick", text_anchor="end"))
    return parts


def _reference(frame: Frame, reference: Reference | None) -> list[Html]:
    if reference is None:
        return []
    y = frame.y(reference.value)
    return [element("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=y, y2=y, class_="reference")]


def _draw(frame: Frame, line: Series, index: int) -> list[Html]:
    parts: list[Html] = []
    for run in _finite_runs(thin_out(line.points)):
        if line.dots or len(run) == 1:
            parts += [
                element(
                    "g",
                    element("title", f"{line.name} at step {x:,.0f}: {y:.6g}"),
                    element("circle", cx=frame.x(x), cy=frame.y(y), r=3.5, class_=f"fill{index}"),
                )
                for x, y in run
            ]
        else:
            coordinates = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in run)
            parts.append(element("polyline", points=coordinates, class_=f"line{index}"))
    return parts


def _finite_runs(points: Sequence[Point]) -> list[list[Point]]:
    runs: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point[1]):
            runs[-1].append(point)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _legend(series: Sequence[Series], reference: Reference | None) -> Html:
    if len(series) < 2 and reference is None:
        return Html("")
    items = [_legend_item(f"fill{i}", line.name, "", "") for i, line in enumerate(series)]
    items += [_legend_item("reference", reference.name, "", "")] if reference else []
    return element("ul", *items, class_="legend")


def _legend_item(kind: str, name: str, words: str, share: str) -> Html:
    shape = (
        element("line", x1=0, x2=12, y1=6, y2=6, class_="reference")
        if kind == "reference"
        else element("rect", x=1, y=1, width=10, height=10, rx=2, class_=kind)
    )
    key = element("svg", shape, viewBox="0 0 12 12", class_="key", aria_hidden="true")
    figures = [element("b", words), element("small", share)] if words else []
    return element("li", key, element("span", name), *figures)


def _description(line: Series, unit: str) -> str:
    values = [point for point in line.points if math.isfinite(point[1])]
    if not values:
        return f"{line.name} has no finite value"
    (first, start), (last, end) = values[0], values[-1]
    lowest = min(y for _, y in values)
    highest = max(y for _, y in values)
    return (
        f"from {start:.4g} at step {first:,.0f} to {end:.4g} at step {last:,.0f}, "
        f"between {lowest:.4g} and {highest:.4g} {unit}"
    ).rstrip()
