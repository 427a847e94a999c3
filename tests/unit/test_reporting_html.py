"""The page: well-formed, self-contained, safe, and right about what happened."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reporting_samples import (
    GIB,
    candidate,
    equal_parity,
    impossible_plan,
    pipeline,
    plan,
    refused_parity,
    steps,
    wrong_parity,
)

from apportion.errors import OptionError
from apportion.records import (
    Candidate,
    Excluded,
    Job,
    Parity,
    Plan,
    Report,
    StepRecord,
    to_json_text,
)
from apportion.reporting import MetricsWriter, headline, next_steps, read_run, render, write_report
from apportion.reporting.charts import Series, label_ticks, line_chart, thin_out, ticks
from apportion.reporting.markup import Html, element, escape
from apportion.reporting.verdict import Mood, median_seconds, mood

VOID = {"meta", "br"}
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\x00"


class Page(HTMLParser):
    """Checks that every element is closed where it should be, and remembers tags, ids and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert len(attrs) == len(dict(attrs)), f"an attribute twice in {tag}"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


def report(
    records: tuple[StepRecord, ...],
    *,
    parity: Parity | None = None,
    made: Plan | None = None,
    outcome: str = "done",
) -> Report:
    return Report(
        name="run",
        plan=made or plan(),
        world_size=4,
        steps=records,
        validation=((50, "accuracy", 0.7), (50, "loss", 2.1)) if records else (),
        parity=parity,
        measured_step_seconds=median_seconds(records),
        measured_peak_bytes=9 * GIB if records else 0,
        outcome=outcome,
        notes=("a note",),
        job=Job(target="examples/text.py", steps=200, versions={"torch": "2.13.0"}),
    )


NAN = tuple(replace(r, loss=math.nan if r.step > 60 else r.loss) for r in steps(90))
REPORTS = {
    "whole": report(steps(200), parity=equal_parity()),
    "one step": report(steps(1), parity=equal_parity()),
    "no step": report((), outcome="stopped after 0 steps of 200"),
    "nan": report(NAN, parity=wrong_parity()),
    "only nan": report(tuple(replace(r, loss=math.nan, grad_norm=math.nan) for r in steps(3))),
    "nothing fits": report((), made=impossible_plan()),
    "pipeline": report(steps(3000), parity=refused_parity(), made=replace(plan(), best=pipeline())),
    "constant": report(tuple(replace(r, loss=0.0, lr=0.0, seconds=0.0) for r in steps(4))),
}


def test_the_checker_sees_faults() -> None:
    for text in ("<p><b></p></b>", "<p>", "</p>", '<p id="a" id="b"></p>'):
        with pytest.raises(AssertionError):
            Page(text)


@pytest.mark.parametrize("name", REPORTS)
def test_page_is_well_formed_and_fetches_nothing(name: str) -> None:
    text = render(REPORTS[name])
    page = Page(text)
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "style "}
    assert not re.search(r"https?:|//[a-z]|url\(|@import|\bsrc=", text)
    assert all(attrs["href"].startswith("#") for tag, attrs in page.tags if tag == "a" and attrs["href"])


@pytest.mark.parametrize("name", REPORTS)
def test_page_is_accessible(name: str) -> None:
    page = Page(render(REPORTS[name]))
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    links = {str(attrs["href"])[1:] for tag, attrs in page.tags if tag == "a"}
    labels = {attrs["aria-labelledby"] for tag, attrs in page.tags if "aria-labelledby" in attrs}
    assert links | labels <= set(ids)
    drawings = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert all(attrs.get("aria-label") or attrs.get("aria-hidden") == "true" for attrs in drawings)
    assert sum(tag == "h1" for tag, _ in page.tags) == 1
    assert ("html", {"lang": "en"}) in page.tags
    tables = sum(tag == "table" for tag, _ in page.tags)
    assert sum(tag == "caption" for tag, _ in page.tags) == tables


@pytest.mark.parametrize("name", REPORTS)
def test_drawings_hold_no_broken_numbers(name: str) -> None:
    page = Page(render(REPORTS[name]))
    drawn = {"line", "rect", "circle", "polyline", "text"}
    values = [str(value) for tag, attrs in page.tags if tag in drawn for value in attrs.values()]
    assert not [value for value in values if re.search(r"nan|inf", value)]


def hostile_candidate(base: Candidate) -> Candidate:
    return replace(base, name=HOSTILE, why=(HOSTILE,))


def test_hostile_text_stays_text() -> None:
    bad = hostile_candidate(candidate())
    made = replace(
        plan(),
        model=replace(plan().model, name=HOSTILE),
        cluster=replace(plan().cluster, kind=HOSTILE),
        best=bad,
        candidates=(bad, replace(hostile_candidate(candidate(slower=2.0)), micro_batch_size=1)),
        excluded=(Excluded(name=HOSTILE, reason=HOSTILE, try_=HOSTILE),),
    )
    parity = replace(
        wrong_parity(), reason=HOSTILE, worst=replace(wrong_parity().worst, name=HOSTILE), notes=(HOSTILE,)
    )
    whole = replace(
        report(steps(5), parity=parity, made=made, outcome=HOSTILE),
        name=HOSTILE,
        notes=(HOSTILE,),
        validation=((5, HOSTILE, 1.0),),
        job=Job(target=HOSTILE, overrides={HOSTILE: HOSTILE}, versions={HOSTILE: HOSTILE}),
    )
    page = Page(render(whole))
    assert not {tag for tag, _ in page.tags} & {"script", "img"}
    assert not [key for _, attrs in page.tags for key in attrs if key.startswith("on")]
    assert page.text.count("<script>alert(1)</script>") >= 12
    assert "\x00" not in render(whole)


def test_markup_escapes_text_but_not_html() -> None:
    assert element("p", "<b>", Html("<i></i>"), title='"') == '<p title="&quot;">&lt;b&gt;<i></i></p>'
    assert escape(escape("<")) == "&lt;"


def test_headline_tells_what_ran_was_it_right_and_how_fast() -> None:
    words = " ".join(headline(REPORTS["whole"]))
    assert "gpt ran 200 steps on 4 ranks as ddp." in words
    assert "gave the answer of one device: the largest relative error is 2.1e-07" in words
    assert "5% longer than predicted (120.0 ms)" in words
    assert "The loss fell from 4.46811" in words


@pytest.mark.parametrize(
    ("name", "expected", "advice"),
    [
        ("whole", Mood.GOOD, "Nothing asks for a change."),
        ("nan", Mood.BAD, "Do not use these weights."),
        ("no step", Mood.CAREFUL, "the run resumes from its last checkpoint"),
        ("nothing fits", Mood.CAREFUL, "16 devices instead of 4"),
        ("pipeline", Mood.CAREFUL, "apportion verify"),
        ("only nan", Mood.BAD, "lower learning rate"),
    ],
)
def test_mood_and_advice(name: str, expected: Mood, advice: str) -> None:
    assert mood(REPORTS[name]) is expected
    assert advice in " ".join(next_steps(REPORTS[name]))


def test_a_prediction_that_is_off_is_called_off() -> None:
    slow = tuple(replace(record, seconds=record.seconds * 1.6) for record in steps(30))
    assert "calibrate" in " ".join(next_steps(report(slow, parity=equal_parity())))
    assert "calibrate" not in " ".join(next_steps(report(steps(30), parity=equal_parity())))


def test_a_loss_that_does_not_fall_is_noticed() -> None:
    flat = tuple(replace(record, loss=2.0) for record in steps(40))
    assert "does not fall" in " ".join(next_steps(report(flat, parity=equal_parity())))


def write_run(run_dir: Path, *, count: int, target_steps: int | None = 200) -> None:
    run_dir.mkdir()
    (run_dir / "plan.json").write_text(to_json_text(plan()))
    (run_dir / "job.json").write_text(to_json_text(Job(target="t.py", steps=target_steps)))
    (run_dir / "parity.json").write_text(to_json_text(equal_parity()))
    writer = MetricsWriter(run_dir, resume_step=0)
    for record in steps(count):
        writer.on_step(record)
    writer.on_validation(count, {"loss": 1.5, "accuracy": 0.9})
    writer.close()


def test_write_report_reads_the_run_directory(tmp_path: Path) -> None:
    write_run(tmp_path / "a", count=200)
    path = write_report(tmp_path / "a")
    assert path == tmp_path / "a" / "report.html"
    assert not (tmp_path / "a" / "report.html.new").exists()
    page = Page(path.read_text(encoding="utf-8"))
    assert "All good" in page.text
    assert "0.90000" in page.text
    read = read_run(tmp_path / "a")
    assert (read.outcome, read.world_size, read.measured_peak_bytes) == ("done", 4, 9 * GIB)
    assert read.measured_step_seconds == pytest.approx(0.126, rel=0.05)
    assert read.steps == steps(200)


def test_a_run_that_was_stopped_says_so(tmp_path: Path) -> None:
    write_run(tmp_path / "a", count=100)
    assert read_run(tmp_path / "a").outcome == "stopped after 100 steps of 200"
    write_run(tmp_path / "b", count=100, target_steps=None)
    assert read_run(tmp_path / "b").outcome == "done"


def test_only_the_plan_is_needed(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(to_json_text(plan()))
    assert "made no step" in Page(write_report(tmp_path).read_text(encoding="utf-8")).text


def test_what_is_no_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="is not a run directory"):
        write_report(tmp_path)
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(OptionError, match=r"plan\.json cannot be read"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_inside_and_told_apart(low: float, size: float) -> None:
    size = max(size, 1e-8 * abs(low))
    found = ticks(low, low + size)
    slack = 1e-6 * size
    assert 1 <= len(found) <= 7
    assert all(low - slack <= value <= low + size + slack for value in found)
    assert len(set(label_ticks(found))) == len(found)


def test_ticks_are_round() -> None:
    assert ticks(0, 1) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert label_ticks(ticks(0, 3e-4)) == ["0", "0.0001", "0.0002", "0.0003"]
    assert label_ticks([100000.0, 100000.25]) == ["100000", "100000.2"]


@given(st.lists(st.floats(-10, 10) | st.just(math.nan), min_size=1, max_size=3000))
def test_thinning_keeps_the_ends_and_the_extremes(values: list[float]) -> None:
    points = [(float(i), value) for i, value in enumerate(values)]
    kept = thin_out(points, limit=50)
    assert len(kept) <= 80
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        left = [value for _, value in kept if math.isfinite(value)]
        assert (min(left), max(left)) == (min(finite), max(finite))
    assert kept[-1][0] == points[-1][0]


def test_a_break_in_the_line_is_a_break_in_the_drawing() -> None:
    points = tuple((float(i), math.nan if i == 5 else float(i)) for i in range(10))
    assert line_chart("t", [Series(name="s", points=points)]).count("<polyline") == 2
    assert "1 not finite, the first at step 5" in line_chart("t", [Series(name="s", points=points)])
