"""Every command and code block of the documents works as it is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from documents import ROOT, Block, Desk, blocks, commands, missing_lines

LANGUAGES = {"python", "console", "bash"}
KOREAN = ROOT / "README.ko.md"
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
RUNNABLE = [path for path in DOCUMENTS if any(b.language in LANGUAGES for b in blocks(path.read_text()))]


@pytest.mark.slow
@pytest.mark.parametrize("path", RUNNABLE, ids=lambda path: path.name)
def test_document_runs(path: Path, tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    for block in blocks(path.read_text(encoding="utf-8")):
        desk.run(block)


def test_korean_readme_shows_the_same_blocks() -> None:
    english = [
        (b.language, b.options, b.text) for b in blocks((ROOT / "README.md").read_text(encoding="utf-8"))
    ]
    korean = [(b.language, b.options, b.text) for b in blocks(KOREAN.read_text(encoding="utf-8"))]
    assert english == korean


def test_cli_page_names_every_command_and_option() -> None:
    listing = (ROOT / "tests" / "tables" / "cli_options.txt").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    words = [line.split()[:2] for line in listing.splitlines() if not line.startswith("#")]
    assert len(words) > 100
    assert {command for command, _ in words if f"`apportion {command}" not in page} == set()
    assert {option for _, option in words if f"`{option}" not in page} == set()


def test_blocks_and_commands_are_read() -> None:
    text = "a\n```console exit=3\n$ one \\\n    two\nout 1\n$ three\n```\n```python file=x.py\ny = 1\n```\n"
    first, second = blocks(text)
    assert (first.language, first.options, first.line) == ("console", {"exit": "3"}, 2)
    assert second == Block(language="python", options={"file": "x.py"}, text="y = 1\n", line=8)
    assert [(c.words, c.printed) for c in commands(first.text)] == [("one two", ("out 1",)), ("three", ())]


def test_printed_lines_are_compared_but_for_their_numbers() -> None:
    printed = "head\nstep: 10  loss: 2.5e-3  ████░ 5%\nlast line\n"
    assert missing_lines(("step: 1 loss: 7 ░ 60%", "...", "last line"), printed) == []
    assert missing_lines(("last line", "step: 1"), printed) == ["step: 1"]
    assert missing_lines(("step: 1 gain: 7",), printed) == ["step: 1 gain: 7"]


def test_a_wrong_exit_code_or_output_is_seen(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    desk.run(Block(language="console", options={"exit": "3"}, text="$ exit 3\n", line=1))
    with pytest.raises(AssertionError, match="exit code 3, not 0"):
        desk.run(Block(language="console", options={}, text="$ exit 3\n", line=1))
    with pytest.raises(AssertionError, match="not printed: \\['b'\\]"):
        desk.run(Block(language="console", options={}, text="$ echo a\nb\n", line=1))
    with pytest.raises(AssertionError, match="exit code 1, not 0"):
        desk.run(Block(language="python", options={}, text="raise SystemExit(1)\n", line=1))
