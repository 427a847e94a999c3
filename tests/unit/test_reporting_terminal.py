"""Tables: recorded text, widths, ASCII, colour."""

from __future__ import annotations

import re
from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reporting_golden import SHEETS, read
from reporting_samples import GIB, candidate, component, fsdp, pipeline, plan, profile
from rich.console import Console

from apportion.records import (
    CompareRow,
    Comparison,
    Mesh,
    Strategy,
)
from apportion.reporting import (
    Sheet,
    compare_table,
    component_table,
    doctor_table,
    placement_picture,
    plan_table,
)
from apportion.reporting.components import fold, label_group
from apportion.reporting.layout import bar, wrap

NUMBER = re.compile(r"\d[\d,.]*(?: [KMGT]?i?B\b| ms\b|%)?")


@pytest.mark.parametrize("name", SHEETS)
def test_table_is_as_recorded(name: str) -> None:
    sheet, width = SHEETS[name]
    assert sheet.text(width) == read(name)


@pytest.mark.parametrize("name", SHEETS)
@pytest.mark.parametrize("width", [80, 100, 200])
def test_no_line_is_wider_than_the_terminal(name: str, width: int) -> None:
    assert max(len(line) for line in SHEETS[name][0].text(width).splitlines()) <= width


@pytest.mark.parametrize("width", range(80, 180, 7))
def test_every_width_shows_the_same_numbers(width: int) -> None:
    def figures(text: str) -> set[str]:
        return set(NUMBER.findall(re.sub(r"\s+", " ", text)))

    assert figures(plan_table(plan()).text(width)) >= {"546,133", "8.4 GiB", "120.0 ms", "32.5%", "0.012"}


def test_names_are_shortened_before_numbers() -> None:
    long = replace(candidate(), name="x" * 200)
    text = plan_table(replace(plan(), best=long, candidates=(long,))).text(80)
    row = next(line for line in text.splitlines() if "GiB " in line and "…" in line)
    assert len(row) <= 80
    assert "546,133" in row


@pytest.mark.parametrize("name", SHEETS)
def test_ascii_terminals_get_ascii_in_the_same_places(name: str) -> None:
    sheet, width = SHEETS[name]
    ascii_text = sheet.text(width, ascii_only=True)
    assert ascii_text.isascii()
    assert [len(line) for line in ascii_text.splitlines()] == [
        len(line) for line in sheet.text(width).splitlines()
    ]


def draw(sheet: Sheet, *, terminal: bool, encoding: str = "utf-8") -> str:
    class Stream(StringIO):
        @property
        def encoding(self) -> str:  # type: ignore[override]
            return encoding

    console = Console(
        file=Stream(), width=100, force_terminal=terminal, color_system="standard" if terminal else None
    )
    console.print(sheet)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_colour_only_on_a_terminal() -> None:
    assert "\x1b[" not in draw(plan_table(plan()), terminal=False)
    assert "\x1b[" in draw(plan_table(plan()), terminal=True)
    assert "\x1b[" in plan_table(plan()).ansi(100)


def test_console_without_unicode_gets_ascii() -> None:
    assert draw(plan_table(plan()), terminal=False, encoding="ascii").isascii()
    assert not draw(plan_table(plan()), terminal=False).isascii()


def test_plan_without_candidates_or_limits() -> None:
    empty = replace(plan(), best=None, candidates=(), excluded=(), warnings=())
    assert "Nothing fits." in plan_table(empty).text()
    cluster = replace(plan().cluster, device_memory_bytes=0)
    assert "memory of" not in plan_table(replace(plan(), cluster=cluster)).text()


def test_a_loser_that_the_pick_names_is_not_named_again() -> None:
    assert "not zero1" in plan_table(plan()).text()
    best = replace(plan().best or candidate(), why=("zero1: 17 % slower",))
    told = replace(plan(), best=best, candidates=(best, *plan().candidates[1:]))
    assert "not zero1" not in plan_table(told).text()
    assert "not fsdp" in plan_table(told).text()


def test_markup_in_names_is_text() -> None:
    hostile = replace(candidate(), name="[red]x[/red]")
    shown = draw(plan_table(replace(plan(), best=hostile, candidates=(hostile,))), terminal=False)
    assert "[red]x[/red]" in shown


@pytest.mark.parametrize(
    ("comparison", "sentence"),
    [
        (Comparison(rows=(), pick="ddp"), "No strategy ran."),
        (Comparison(rows=(), pick="ddp", best="ddp"), "is the fastest measured."),
        (Comparison(rows=(), pick="ddp", best="fsdp", regret=float("nan")), "was not measured."),
        (Comparison(rows=(), pick="ddp", best="fsdp", regret=0.0731), "takes 7.3% longer a step"),
    ],
)
def test_regret_in_words(comparison: Comparison, sentence: str) -> None:
    assert sentence in compare_table(comparison).text()


def test_compare_row_without_a_prediction() -> None:
    row = CompareRow(strategy="ddp", measured_step_seconds=0.1, measured_peak_bytes=GIB)
    assert row.ratio == 0
    assert "nan" in compare_table(Comparison(rows=(row,), pick="ddp", best="ddp")).text()


def test_doctor_without_checks() -> None:
    assert doctor_table(()).text() == "Nothing stands in the way.\n"


@given(st.integers(12, 120), st.lists(st.sampled_from(["12.3 GiB", "4 ms", "word", "30 %", "1,024 ranks"])))
def test_wrapping_keeps_a_number_with_its_unit(width: int, words: list[str]) -> None:
    lines = [line.plain for line in wrap(" ".join(words), width=width)]
    assert "\n".join(lines).split() == " ".join(words).split()
    assert not any(re.search(r"\d$", line.rstrip()) for line in lines)
    assert all(len(line) <= width for line in lines)


@given(st.floats(0, 1), st.integers(1, 40))
def test_bar_grows_with_its_fraction(fraction: float, size: int) -> None:
    drawn = bar(fraction, size=size)
    assert len(drawn) == size
    assert abs(drawn.count("█") - fraction * size) <= 1
    assert (drawn[0] != "░") == (fraction > 0)


def test_equal_blocks_are_one_row_and_others_are_not() -> None:
    text = component_table(profile(), depth=1).text(100)
    assert text.count("x12") == 1
    assert "h.0-11 x12" in text
    assert "h.1 " not in text
    unlike = replace(profile().components[5], fingerprint="other")
    components = (*profile().components[:5], unlike, *profile().components[6:])
    assert "h.0,2,3,… x11" in component_table(replace(profile(), components=components)).text(100)


def test_depth_cuts_the_tree() -> None:
    assert "attn" in component_table(profile()).text()
    assert "attn" not in component_table(profile(), depth=1).text()
    assert "  wte" not in component_table(replace(profile(), shared_parameters=()), depth=0).text()


def test_prefixes_are_compared_by_parts() -> None:
    root = fold([component("", "M"), component("h", "A"), component("h.x", "B"), component("hx.y", "C")])
    assert [child.component.fqn for child in root.children] == ["h", "hx.y"]
    assert label_group(("layers.0", "layers.2", "layers.4"), "") == "layers.0,2,4 x3"


def filled(text: str, name: str) -> list[str]:
    """Return the cells of one row of a placement picture."""
    row = next(line for line in text.splitlines() if line.startswith(name))
    return row[14:].split()


def covers(cells: list[str]) -> bool:
    return all(any(cell[i] in "█▒" for cell in cells) for i in range(8))


@pytest.mark.parametrize("shards", [1, 2, 3, 4, 5, 7, 8])
def test_shards_cover_the_model_once(shards: int) -> None:
    layout = replace(fsdp(), mesh=Mesh(dp_shard=shards))
    cells = filled(placement_picture(layout).text(200), "parameters")
    assert len(cells) == shards
    assert covers(cells)
    assert sum(cell.count("█") for cell in cells) == 8
    if shards > 1:
        assert not covers(cells[1:])


@pytest.mark.parametrize(
    ("strategy", "whole"),
    [
        (Strategy.DDP, {"parameters", "gradients", "optimizer"}),
        (Strategy.ZERO1, {"parameters", "gradients"}),
        (Strategy.ZERO2, {"parameters"}),
        (Strategy.FSDP, set()),
    ],
)
def test_each_strategy_shards_what_it_says(strategy: Strategy, whole: set[str]) -> None:
    mesh = Mesh(dp_shard=4) if strategy is Strategy.FSDP else Mesh(dp_replicate=4)
    text = placement_picture(candidate(strategy=strategy, slower=1)).text()
    if strategy is Strategy.FSDP:
        text = placement_picture(replace(fsdp(), mesh=mesh)).text()
    found = {name for name in ("parameters", "gradients", "optimizer") if covers(filled(text, name)[:1])}
    assert found == whole


def test_stages_cover_the_model() -> None:
    cells = filled(placement_picture(pipeline()).text(200), "parameters")
    assert covers([cells[0], cells[4], "▒" * 0 + "░" * 6 + "▒░", cells[-1]])
    assert not covers(cells[:4])


def test_samples_are_dealt_once_over_replicas_and_shards() -> None:
    layout = replace(candidate("hsdp", strategy=Strategy.HSDP), mesh=Mesh(dp_replicate=2, dp_shard=3))
    row = next(line for line in placement_picture(layout).text(120).splitlines() if line.startswith("samples"))
    assert re.findall(r"(\d) of 6", row) == list("123456")
    text = placement_picture(layout).text(120)
    assert filled(text, "parameters")[:3] == filled(text, "parameters")[3:]


def test_many_ranks_show_the_first_and_the_last() -> None:
    text = placement_picture(replace(candidate(), mesh=Mesh(dp_shard=1024), strategy=Strategy.FSDP)).text(80)
    assert "rank 1023" in text
    assert "1/1024" in text
    assert max(len(line) for line in text.splitlines()) <= 80
