"""The checkers behind `test_habits.py`: each takes source text or an import graph and returns what is wrong.

They return lists of lines rather than raise, so that a test can show that a bad example is caught.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "apportion"

# From the bottom to the top: a part imports only parts of earlier rows. Parts of one row are apart.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "torch_private"}),
    frozenset({"units"}),
    frozenset({"records"}),
    frozenset({"launching", "reporting", "doctoring"}),
    frozenset({"batching", "describing", "reading"}),
    frozenset({"profiling"}),
    frozenset({"costing"}),
    frozenset({"planning"}),
    frozenset({"applying"}),
    frozenset({"running"}),
    frozenset({"api", "rank_frame"}),
    frozenset({"rank"}),
    frozenset({"recipes"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
# Parts that stand aside from the flow: these see records only, and nothing below `api` sees them.
ASIDE = frozenset({"launching", "reporting", "doctoring"})
SEEN_BY_ASIDE = frozenset({"errors", "units", "records"})
FLOW = frozenset().union(*LAYERS[4:10])
# Planning must answer without loading torch.
WITHOUT_TORCH = frozenset({"errors", "units", "records", "costing", "planning", "reporting"})

MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 7
# These stand in for a torch function and are called with its arguments.
MIRRORS = frozenset({"global_batch_norm", "layer_norm_backward"})

Function = ast.FunctionDef | ast.AsyncFunctionDef


def part_of(name: str) -> str:
    """Return the row entry that a module `apportion.a.b` belongs to: `a`; `cli_plan` belongs to `cli`."""
    first = name.split(".")[1] if "." in name else "apportion"
    return "cli" if first.startswith("cli_") else first


def module_name(path: Path, root: Path) -> str:
    """Return the dotted name of a source file under the package directory `root`."""
    parts = (root.name, *path.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_modules(root: Path) -> dict[str, str]:
    """Return the source of every module of a package by dotted name."""
    return {module_name(path, root): path.read_text(encoding="utf-8") for path in sorted(root.rglob("*.py"))}


def import_graph(
    modules: Mapping[str, str], packages: Iterable[str], *, for_types: bool = True
) -> dict[str, set[str]]:
    """Return which modules each one imports, deferred imports too; `for_types` keeps those for types only."""
    known, are_packages = set(modules), set(packages)
    graph = {}
    for name, source in modules.items():
        base = name if name in are_packages else name.rpartition(".")[0]
        nodes = list(ast.walk(ast.parse(source)))
        typing_only = set() if for_types else {id(inner) for node in nodes for inner in _type_block(node)}
        found = {
            target for node in nodes if id(node) not in typing_only for target in _targets(node, base, known)
        }
        graph[name] = (found & known) - {name}
    return graph


def _type_block(node: ast.AST) -> list[ast.AST]:
    """Return what stands under `if TYPE_CHECKING:`."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return [inner for statement in node.body for inner in ast.walk(statement)]
    return []


def _targets(node: ast.AST, base: str, known: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        above = base.split(".")[: len(base.split(".")) - node.level + 1] if node.level else []
        source = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            inner = f"{source}.{alias.name}"
            yield inner if inner in known else source


def order_violations(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the imports that go up or sideways."""
    row = {part: i for i, layer in enumerate(LAYERS) for part in layer}
    wrong = []
    for module, targets in sorted(graph.items()):
        part = part_of(module)
        if part == "apportion":
            continue
        if part not in row:
            wrong.append(f"{module} belongs to no row of LAYERS")
            continue
        for target in sorted(targets):
            other = part_of(target)
            if other in (part, "apportion"):
                continue
            if row.get(other, len(LAYERS)) >= row[part]:
                wrong.append(f"{module} imports {target}, which comes later")
            elif part in ASIDE and other not in SEEN_BY_ASIDE:
                wrong.append(f"{module} imports {target}; it may see records, errors and units only")
            elif part in FLOW and other in ASIDE:
                wrong.append(f"{module} imports {target}, which stands aside from the flow")
    return wrong


def cycles(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the import cycles between modules, each as `a -> b -> a`."""
    done: set[str] = set()
    found = []

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            found.append(" -> ".join([*path[path.index(module) :], module]))
            return
        if module in done:
            return
        for target in sorted(graph.get(module, ())):
            visit(target, (*path, module))
        done.add(module)

    for module in sorted(graph):
        visit(module, ())
    return found


def functions(tree: ast.AST) -> Iterator[Function]:
    """Yield every function of a module, methods and nested ones included."""
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def body_lines(function: Function) -> int:
    """Return the lines of a function without its decorators and docstring."""
    last = function.end_lineno or function.lineno
    first = function.body[0]
    lines = last - function.lineno + 1
    if (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    ):
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def long_functions(source: str) -> list[str]:
    """Return the functions of more than MAX_FUNCTION_LINES lines without the docstring."""
    return [
        f"{function.name} has {body_lines(function)} lines"
        for function in functions(ast.parse(source))
        if body_lines(function) > MAX_FUNCTION_LINES
    ]


def crowded_functions(source: str) -> list[str]:
    """Return the functions with more than MAX_PARAMETERS places for positional arguments, MIRRORS aside."""
    found = []
    for function in functions(ast.parse(source)):
        count = len([*function.args.posonlyargs, *function.args.args])
        if count > MAX_PARAMETERS and function.name not in MIRRORS:
            found.append(f"{function.name} takes {count} positional arguments")
    return found


def unannotated(source: str) -> list[str]:
    """Return the functions that lack the annotation of a parameter or of what they return."""
    found = []
    for function in functions(ast.parse(source)):
        arguments = function.args
        named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        starred = [argument for argument in (arguments.vararg, arguments.kwarg) if argument is not None]
        bare = [a.arg for a in (*named, *starred) if a.annotation is None and a.arg not in ("self", "cls")]
        if function.returns is None:
            bare.append("return")
        if bare:
            found.append(f"{function.name}: {', '.join(bare)}")
    return found


def prints(source: str) -> list[str]:
    """Return the calls of print."""
    return [
        f"line {node.lineno}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def swallowed(source: str) -> list[str]:
    """Return the handlers that catch everything and do nothing about it, and bare excepts."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        everything = isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
        idle = all(isinstance(item, ast.Pass | ast.Continue) for item in node.body)
        if node.type is None or (everything and idle):
            found.append(f"line {node.lineno}")
    return found


def globals_changed(source: str) -> list[str]:
    """Return the `global` statements."""
    return [f"line {node.lineno}" for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Global)]


def hides_exports(source: str) -> bool:
    """Return whether a package's front gathers names without listing them in `__all__`."""
    body = ast.parse(source).body
    gathers = any(isinstance(node, ast.ImportFrom) and node.level for node in body)
    names = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return gathers and not any(isinstance(name, ast.Name) and name.id == "__all__" for name in names)


def private_torch(source: str) -> list[str]:
    """Return the uses of torch names that start with `_`, imported or reached by attribute.

    Operators (`torch.ops.aten._softmax`) are apart: their names are what a dispatch mode is handed.
    """
    tree = ast.parse(source)
    names: set[str] = set()
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    names.add(alias.asname or "torch")
                    found += _private(alias.name, node.lineno)
        elif (
            isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "torch"
        ):
            for alias in node.names:
                names.add(alias.asname or alias.name)
                found += _private(f"{node.module}.{alias.name}", node.lineno)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            chain = _chain(node)
            if chain and chain[0] in names:
                found += _private(".".join(chain), node.lineno)
    return sorted(set(found))


def _private(dotted: str, line: int) -> list[str]:
    parts = dotted.split(".")
    hidden = [part for part in parts if part.startswith("_") and not part.startswith("__")]
    return [f"line {line}: {dotted}"] if hidden and parts[:2] != ["torch", "ops"] else []


def _chain(node: ast.expr) -> list[str]:
    if isinstance(node, ast.Attribute):
        chain = _chain(node.value)
        return [*chain, node.attr] if chain else []
    return [node.id] if isinstance(node, ast.Name) else []


_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*$", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as a reader's browser makes them."""
    headings = _HEADING.findall(_FENCE.sub("", text))
    plain = (re.sub(r"[`*]", "", heading).lower() for heading in headings)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading)) for heading in plain}


def broken_links(path: Path) -> list[str]:
    """Return the links of a Markdown file that lead to no file or heading here; the web is not asked."""
    found = []
    for target in _LINK.findall(_FENCE.sub("", path.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists():
            found.append(f"{path.name}: {target} (no such file)")
        elif anchor and there.suffix == ".md" and anchor not in anchors(there.read_text(encoding="utf-8")):
            found.append(f"{path.name}: {target} (no such heading)")
    return found


_MACHINE_PATH = re.compile(r"(?<![\w.~>/-])/(?:home|root|Users|work|mnt|media)/[A-Za-z0-9_./-]+")


def machine_paths(text: str) -> list[str]:
    """Return the absolute paths that exist on somebody's machine only."""
    return [
        f"line {number}: {found}"
        for number, line in enumerate(text.splitlines(), start=1)
        for found in _MACHINE_PATH.findall(line)
    ]
