"""Read a Markdown document as a session at a terminal, and run it in a folder of its own.

    ```python file=mine.py     the reader writes this file
    ```python                  the reader runs this as a script
    ```console exit=3          lines from `$ ` are commands, the rest what they print; 0 if no exit is said

In what is printed, numbers stand for any number and bars for any bar; a line `...` stands for any lines. What
differs from run to run in other ways is shown in a block of another kind, such as ```text, which is not run.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 600
# The reader's checkout: what a command of a document may touch.
CHECKOUT = ("Makefile", "pyproject.toml", "README.md", "examples")
# The tests that run this very test, or take as long as all of them; that they exist is checked instead.
NOT_RUN = ("make test", "make check", "make quick", "make bench", "make setup")

_FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_BAR = re.compile(r"[░█▏▎▍▌▋▊▉]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block: its language, the words after it (`file=x.py`), its text and its line."""

    language: str
    options: dict[str, str]
    text: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command line and what it should print."""

    words: str
    printed: tuple[str, ...]


def blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a document in order."""
    for match in _FENCE.finditer(text):
        options = dict(word.split("=", 1) for word in match[2].split() if "=" in word)
        line = text.count("\n", 0, match.start()) + 1
        yield Block(language=match[1], options=options, text=match[3], line=line)


def commands(text: str) -> list[Command]:
    """Return the commands of a console block, each with the lines that follow it; `\\` continues a command."""
    found: list[tuple[str, list[str]]] = []
    open_command = False
    for line in text.splitlines():
        if open_command:
            found[-1] = (found[-1][0].rstrip("\\") + line.strip(), found[-1][1])
        elif line.startswith("$ "):
            found.append((line[2:], []))
        elif found:
            found[-1][1].append(line)
        open_command = line.endswith("\\") and (open_command or line.startswith("$ "))
    return [Command(words=words, printed=tuple(printed)) for words, printed in found]


def pattern_of(line: str) -> re.Pattern[str]:
    """Return what a printed line must look like: its words, any numbers, any bars, any spacing."""
    parts = []
    for token in line.split():
        pieces = re.split(f"({_NUMBER.pattern}|{_BAR.pattern})", token)
        parts.append("".join(_piece(piece) for piece in pieces))
    return re.compile(r"\s+".join(parts))


def _piece(piece: str) -> str:
    if _NUMBER.fullmatch(piece):
        return _NUMBER.pattern
    return _BAR.pattern if _BAR.fullmatch(piece) else re.escape(piece)


def missing_lines(expected: tuple[str, ...], printed: str) -> list[str]:
    """Return the expected lines that were not printed, in the order that they were expected."""
    actual = printed.splitlines()
    position, missing = 0, []
    for line in expected:
        if not line.strip() or line.strip() == "...":
            continue
        pattern = pattern_of(line)
        there = next((i for i in range(position, len(actual)) if pattern.search(actual[i])), None)
        if there is None:
            missing.append(line)
        else:
            position = there + 1
    return missing


class Desk:
    """A folder as a reader has it after a clone, and the commands that he types there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in CHECKOUT:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / name)
        ready = folder / ".ready"
        ready.touch()
        bin_folder = Path(sys.executable).parent
        self.environment = {
            **os.environ,
            "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "100",
            # The environment is there already: make shall not build another one.
            "MAKEFLAGS": f"READY={shlex.quote(str(ready))} BIN={shlex.quote(str(bin_folder))}",
        }

    def run(self, block: Block) -> None:
        """Do what a reader does with a block.

        Raises: AssertionError with the command's output if it ends or prints otherwise than the block says.
        """
        if block.language == "python" and "file" in block.options:
            (self.folder / block.options["file"]).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            script = self.folder / f"block_{block.line}.py"
            script.write_text(block.text, encoding="utf-8")
            self._do(Command(words=f"python {script.name}", printed=()), "0", block)
        elif block.language in ("console", "bash"):
            listed = commands(block.text)
            for command in listed:
                code = block.options.get("exit", "0") if command is listed[-1] else "0"
                self._do(command, code, block)

    def _do(self, command: Command, code: str, block: Block) -> None:
        if command.words in NOT_RUN:
            target = command.words.split()[1]
            assert f"\n{target}:" in (self.folder / "Makefile").read_text(), f"no target: {command.words}"
            return
        done = subprocess.run(
            ["bash", "-c", command.words],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )
        said = f"line {block.line}: $ {command.words}\n{done.stdout[-4000:]}"
        assert str(done.returncode) == code, f"exit code {done.returncode}, not {code}\n{said}"
        missing = missing_lines(command.printed, done.stdout)
        assert missing == [], f"not printed: {missing}\n{said}"
