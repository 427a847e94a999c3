"""The component tree of a profile as a table for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from ..records import Component, Method, Profile
from ..units import format_bytes, format_count, format_flops
from .figures import plural
from .layout import Column, Sheet, align, natural_width, paragraphs, wrap

_COLUMNS = (
    Column("component", right=False),
    Column("parameters"),
    Column("forward"),
    Column("backward"),
    Column("saved"),
    Column("output"),
)
_KIND = Column("kind", right=False)


@dataclass(frozen=True, slots=True)
class Branch:
    """A component with its children; `fqns` are the equal siblings that it stands for, itself first."""

    component: Component
    fqns: tuple[str, ...]
    children: tuple[Branch, ...]


def component_table(profile: Profile, *, depth: int | None = None, width: int | None = None) -> Sheet:
    """Return the component tree down to `depth` levels below the root (None: all).

    Equal numbered siblings are one row, whose figures are those of one of them. `width` fixes the columns;
    None takes the terminal's.
    """

    def draw(available: int) -> list[Text]:
        columns = width or available
        root = fold(profile.components)
        tied = _tied_components(profile)
        rows = [
            _cells(branch, level, label, tied=tied)
            for branch, level, label in _walk(root, 0, "", depth=depth, name=profile.name)
        ]
        return list(
            paragraphs(_head(profile, columns), _table(rows, columns), _foot(profile, root, tied, columns))
        )

    return Sheet(draw)


def fold(components: Sequence[Component]) -> Branch:
    """Return the pre-ordered components as a tree in which equal numbered siblings are one branch."""
    root = components[0]
    subtrees: list[list[Component]] = []
    for component in components[1:]:
        if subtrees and _inside(component.fqn, subtrees[-1][0].fqn):
            subtrees[-1].append(component)
        else:
            subtrees.append([component])
    groups: dict[tuple[str, str, str], list[list[Component]]] = {}
    for subtree in subtrees:
        head, _, last = subtree[0].fqn.rpartition(".")
        alone = not last.isdigit() or not subtree[0].fingerprint
        key = (head, subtree[0].fingerprint, subtree[0].fqn if alone else "")
        groups.setdefault(key, []).append(subtree)
    children = tuple(
        Branch(inner.component, tuple(member[0].fqn for member in members), inner.children)
        for members in groups.values()
        for inner in (fold(members[0]),)
    )
    return Branch(root, (root.fqn,), children)


def _inside(fqn: str, parent: str) -> bool:
    parts, outer = fqn.split("."), parent.split(".")
    return len(parts) > len(outer) and parts[: len(outer)] == outer


def label_group(fqns: Sequence[str], parent: str) -> str:
    """Return a name for equal siblings, without their parent's: `h.0-11 x12`, `layers.0,2,4 x3`."""
    own = [fqn[len(parent) + 1 :] if parent else fqn for fqn in fqns]
    if len(own) == 1:
        return own[0]
    head, dot, _ = own[0].rpartition(".")
    numbers = [int(name.rpartition(".")[2]) for name in own]
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        span = f"{numbers[0]}-{numbers[-1]}"
    else:
        span = ",".join(str(number) for number in numbers[:3]) + (",…" if len(numbers) > 3 else "")
    return f"{head}{dot}{span} x{len(own)}"


def _walk(
    branch: Branch, level: int, parent: str, *, depth: int | None, name: str
) -> Iterator[tuple[Branch, int, str]]:
    yield branch, level, label_group(branch.fqns, parent) or name
    if depth is None or level < depth:
        for child in branch.children:
            yield from _walk(child, level + 1, branch.component.fqn, depth=depth, name=name)


def _cells(branch: Branch, level: int, label: str, *, tied: frozenset[str]) -> list[Text]:
    component = branch.component
    mark = " ~" if component.fqn in tied else ""
    style = "bold" if level == 0 else "cyan" if component.block else ""
    return [
        Text(f"{'  ' * level}{label}{mark}", style=style),
        Text(format_count(component.parameters) if component.parameters else "-"),
        Text(format_flops(component.forward_flops) if component.forward_flops else "-"),
        Text(format_flops(component.backward_flops) if component.backward_flops else "-"),
        Text(format_bytes(component.saved_activation_bytes) if component.saved_activation_bytes else "-"),
        Text(format_bytes(component.output_bytes) if component.output_bytes else "-"),
        Text(component.kind, style="dim"),
    ]


def _table(rows: Sequence[Sequence[Text]], width: int) -> list[Text]:
    """Return the table, with the kinds of module where they fit."""
    wide = (*_COLUMNS, _KIND)
    if natural_width(wide, rows) <= width:
        return align(wide, rows, width=width)
    return align(_COLUMNS, [row[: len(_COLUMNS)] for row in rows], width=width)


def _head(profile: Profile, width: int) -> list[Text]:
    tokens = profile.batch_samples * profile.tokens_per_sample
    batch = plural(profile.batch_samples, "sample") + (f" ({plural(tokens, 'token')})" if tokens else "")
    method = {
        Method.FAKE: "computed without allocating weights",
        Method.MEASURED: "measured in a small real run",
    }[profile.method]
    types = ", ".join(f"{format_count(n)} {name}" for name, n in profile.root.dtypes.items())
    root = profile.root
    frozen = root.parameters - root.trainable_parameters
    about = [f"{profile.name}: {types or format_count(root.parameters) + ' parameters'}"]
    about += [f"{format_count(frozen)} frozen"] if frozen else []
    about += [f"buffers {format_bytes(root.buffer_bytes)}"] if root.buffer_bytes else []
    return [
        *wrap(", ".join(about), width=width, style="bold"),
        *wrap(f"figures for {batch}, {method}", width=width, style="dim"),
    ]


def _foot(profile: Profile, root: Branch, tied: frozenset[str], width: int) -> list[Text]:
    lines: list[Text] = []
    if _has_groups(root):
        lines += wrap("xN: equal components; the row is one of them", width=width, style="dim")
    if tied:
        lines += wrap("~ holds a shared parameter:", width=width, style="dim")
    for group in profile.shared_parameters:
        lines += wrap(" = ".join(group), width=width, indent="    ")
    for note in profile.notes:
        lines += wrap(note, width=width, indent="  ", first="! ", style="yellow")
    return lines


def _has_groups(branch: Branch) -> bool:
    return len(branch.fqns) > 1 or any(_has_groups(child) for child in branch.children)


def _tied_components(profile: Profile) -> frozenset[str]:
    """Return the fqns of the modules that directly hold a shared parameter."""
    return frozenset(name.rpartition(".")[0] for group in profile.shared_parameters for name in group)
