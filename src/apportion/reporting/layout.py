"""Lines of text that fit a terminal: aligned columns, wrapped sentences, bars.

Everything is laid out for the width at hand when it is drawn, and is mapped character by character to ASCII
on a terminal that cannot show more. Numbers are never broken or cut: where a table is too wide, the first
column of names is shortened instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import StringIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

GAP = 2
_EIGHTHS = " ▏▎▍▌▋▊▉"
_ASCII = str.maketrans("█▉▊▋▌▍▎▏░▒▓─│├└·×…µ✓✗▶–“”≥≤\u00a0", '#####....%#-||`-x~u+x>-""><\u0020')
_SPACES = re.compile(r"[ \t\r\n]+")
_NUMBER_AND_UNIT = re.compile(r"(\d) (?=(?:[KMGTP]i?B|B|[mµ]?s|min|h|[KMGTPE]?FLOP|ranks?|steps?)\b|%)")


@dataclass(frozen=True, slots=True)
class Sheet:
    """A rich renderable: `draw(width)` gives its lines for a terminal of that many columns."""

    draw: Callable[[int], Iterable[Text]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw for the console's width, in ASCII where its encoding has nothing else."""
        for line in self.draw(options.max_width):
            line.no_wrap = True
            line.overflow = "ignore"
            yield _ascii(line) if options.ascii_only else line

    def text(self, width: int = 80, *, ascii_only: bool = False) -> str:
        """Return the lines as plain text without trailing spaces."""
        lines = [_ascii(line) if ascii_only else line for line in self.draw(width)]
        return "\n".join(line.plain.rstrip() for line in lines) + "\n"

    def ansi(self, width: int = 80) -> str:
        """Return the lines as a colour terminal shows them."""
        console = Console(file=StringIO(), width=width, force_terminal=True, color_system="standard")
        with console.capture() as capture:
            console.print(self, soft_wrap=True)
        return capture.get()


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading, and whether it is aligned to the right. The first may be shortened."""

    heading: str
    right: bool = True


def align(columns: Sequence[Column], rows: Sequence[Sequence[Text]], *, width: int) -> list[Text]:
    """Return a heading line and one line per row, the first column shortened so that they fit `width`."""
    headings = [Text(column.heading, style="bold") for column in columns]
    sizes = [
        max(cell.cell_len for cell in (heading, *(row[i] for row in rows)))
        for i, heading in enumerate(headings)
    ]
    rest = sum(sizes[1:]) + GAP * (len(sizes) - 1)
    sizes[0] = min(sizes[0], max(width - rest, 12))
    return [_line(columns, sizes, row) for row in (headings, *rows)]


def natural_width(columns: Sequence[Column], rows: Sequence[Sequence[Text]]) -> int:
    """Return the columns of terminal that `align` needs to shorten nothing."""
    sizes = [max([cell_len(c.heading), *(row[i].cell_len for row in rows)]) for i, c in enumerate(columns)]
    return sum(sizes) + GAP * (len(sizes) - 1)


def _line(columns: Sequence[Column], sizes: Sequence[int], cells: Sequence[Text]) -> Text:
    line = Text()
    for i, (column, size, cell) in enumerate(zip(columns, sizes, cells, strict=True)):
        padded = shorten(cell, size)
        space = " " * max(0, size - padded.cell_len)
        line.append(" " * GAP if i else "")
        line.append_text(Text(space) + padded if column.right else padded + Text(space))
    line.rstrip()
    return line


def shorten(text: Text, size: int) -> Text:
    """Return `text` in at most `size` columns, its middle replaced by an ellipsis where it is longer."""
    if text.cell_len <= size:
        return text.copy()
    head = (size - 1) // 2
    plain = text.plain
    tail = ""
    for char in reversed(plain):
        if cell_len(char + tail) > size - 1 - head:
            break
        tail = char + tail
    return Text(f"{set_cell_size(plain, head)}…{tail}", style=text.style)


def wrap(
    sentence: str, *, width: int, indent: str = "", first: str | None = None, style: str = ""
) -> list[Text]:
    """Return the sentence in lines of at most `width` columns, broken at spaces only.

    A number stays with its unit. `first` replaces `indent` on the first line; both have the same length.
    """
    lines: list[str] = []
    current = indent if first is None else first
    empty = True
    for word in _SPACES.split(_NUMBER_AND_UNIT.sub("\\1\u00a0", sentence.strip())):
        if not empty and cell_len(current) + 1 + cell_len(word) > width:
            lines.append(current)
            current, empty = indent, True
        current += word if empty else f" {word}"
        empty = False
    lines.append(current)
    return [Text(line.replace("\u00a0", " "), style=style) for line in lines]


def bar(fraction: float, *, size: int) -> str:
    """Return a bar of `size` columns filled to `fraction`, in eighths of a column."""
    eighths = round(min(max(fraction, 0.0), 1.0) * size * 8)
    if fraction > 0:
        eighths = max(eighths, 1)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(size, "░")


def paragraphs(*groups: Sequence[Text]) -> Iterator[Text]:
    """Yield the groups with an empty line between them; empty groups are left out."""
    started = False
    for group in groups:
        if group and started:
            yield Text()
        started = started or bool(group)
        yield from group


def _ascii(line: Text) -> Text:
    plain = line.plain.translate(_ASCII).encode("ascii", "replace").decode()
    return Text(plain, style=line.style, spans=line.spans, no_wrap=line.no_wrap, overflow=line.overflow)
