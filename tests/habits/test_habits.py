"""How the source is written: imports, sizes, annotations, names. Each checker is shown a bad example too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import habits
from habits import ROOT, SOURCE

MODULES = habits.read_modules(SOURCE)
PACKAGES = [habits.module_name(path, SOURCE) for path in SOURCE.rglob("__init__.py")]
GRAPH = habits.import_graph(MODULES, PACKAGES)
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".csv", ".css", ".html", ".yaml", ".yml", ".json", ""}
WRITTEN = ("src", "tests", "docs", "examples", "benchmarks", "changes", ".ci")


def written_files() -> list[Path]:
    """Return the project's own text files."""
    top = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    below = [path for folder in WRITTEN for path in (ROOT / folder).rglob("*") if path.is_file()]
    return [
        path
        for path in (*top, *below)
        if path.suffix in TEXT_SUFFIXES
        and not any(part == "__pycache__" or part.endswith(".egg-info") for part in path.parts)
    ]


def documents() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "changes").glob("*.md")])


def listed(checker: Callable[[str], list[str]], *, but: tuple[str, ...] = ()) -> list[str]:
    """Return what a checker finds in the modules of the package, each line with its module."""
    return [
        f"{name}: {found}" for name, source in MODULES.items() if name not in but for found in checker(source)
    ]


def test_imports_go_down() -> None:
    assert len(GRAPH) > 50
    assert habits.order_violations(GRAPH) == []


def test_imports_have_no_cycle() -> None:
    assert habits.cycles(habits.import_graph(MODULES, PACKAGES, for_types=False)) == []


def test_order_and_cycle_checkers_see_what_is_wrong() -> None:
    modules = {
        "apportion.records": "from ..apportion.records import plan",
        "apportion.costing": "def later():\n    from .planning import make_plan",
        "apportion.planning": "from . import costing",
        "apportion.launching": "from .reading import parts",
        "apportion.running": "import apportion.reporting",
        "apportion.reading": "",
        "apportion.reporting": "",
        "apportion.surprise": "",
    }
    graph = habits.import_graph(modules, [])
    assert graph["apportion.running"] == {"apportion.reporting"}
    found = "\n".join(habits.order_violations(graph))
    for line in (
        "apportion.costing imports apportion.planning, which comes later",
        "apportion.launching imports apportion.reading, which comes later",
        "apportion.running imports apportion.reporting, which stands aside",
        "apportion.surprise belongs to no row",
    ):
        assert line in found
    assert habits.cycles(graph) == ["apportion.costing -> apportion.planning -> apportion.costing"]


def test_planning_needs_no_torch() -> None:
    names = sorted(habits.WITHOUT_TORCH)
    program = (
        f"import importlib, sys\nfor name in {names!r}:\n    importlib.import_module('apportion.' + name)\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_files_are_short() -> None:
    sizes = {name: source.count("\n") for name, source in MODULES.items()}
    assert {name: lines for name, lines in sizes.items() if lines >= habits.MAX_FILE_LINES} == {}


@pytest.mark.parametrize(
    ("checker", "but", "bad"),
    [
        (habits.long_functions, (), "def f():\n" + "    x = 1\n" * 60),
        (habits.crowded_functions, (), "def f(a, b, c, d, e, f, g, h): ..."),
        (habits.unannotated, (), "def f(a: int, *rest) -> int: ..."),
        (habits.prints, ("apportion.cli",), "print('hello')"),
        (habits.swallowed, (), "try:\n    f()\nexcept Exception:\n    pass"),
        (habits.globals_changed, (), "def f() -> None:\n    global x\n    x = 1"),
        (habits.private_torch, ("apportion.torch_private",), "from torch._C import Node"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_source(checker: Callable[[str], list[str]], but: tuple[str, ...], bad: str) -> None:
    assert checker(bad), "the checker does not see a bad example"
    assert listed(checker, but=but) == []


def test_private_torch_is_seen_through_aliases() -> None:
    source = "import torch.distributed as dist\nfrom torch import nn\ndist.group._default\nnn.Linear.__name__\n"
    assert habits.private_torch(source) == ["line 3: dist.group._default"]


def test_packages_say_what_they_export() -> None:
    assert habits.hides_exports("from .a import b")
    assert [name for name in PACKAGES if habits.hides_exports(MODULES[name])] == []


def test_links_of_documents_lead_somewhere(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n[here](#a-b-c) [gone](gone.md) [no](page.md#d)\n```\n[x](y)\n```\n")
    assert habits.broken_links(page) == [
        "page.md: gone.md (no such file)",
        "page.md: page.md#d (no such heading)",
    ]
    assert [line for path in documents() for line in habits.broken_links(path)] == []


def test_no_path_of_one_machine() -> None:
    assert habits.machine_paths("see /" + "home/me/x and ~/home/me") == ["line 1: /" + "home/me/x"]
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in written_files()
        for line in habits.machine_paths(path.read_text(encoding="utf-8"))
    ]
    assert found == []
