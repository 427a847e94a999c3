"""Which rank holds what, as a picture of plain text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from ..records import Candidate, Mesh, Strategy
from .figures import plural
from .layout import Sheet, wrap
from .wording import describe_mesh

CELL = 8
SHOWN_RANKS = 8
_NAMES = 12


@dataclass(frozen=True, slots=True)
class Held:
    """A kind of tensor as the ranks hold it: over how many ranks one copy is spread, and in words."""

    name: str
    shards: int
    words: str


def placement_picture(candidate: Candidate) -> Sheet:
    """Return one column per rank (the first and last where there are many) and one row per kind of tensor.

    A bar stands for the model from its first to its last component; the filled part is what the rank holds.
    """

    def draw(width: int) -> list[Text]:
        ranks = _shown_ranks(_num_places(candidate), width)
        lines = wrap(_title(candidate), width=width, style="bold")
        lines.append(_row("", [_heading(candidate, rank) for rank in ranks]))
        lines.append(_row("samples", [_samples(candidate, rank) for rank in ranks]))
        held = holdings(candidate)
        for item in held:
            cells = [_cell(candidate, item, rank) for rank in ranks]
            lines.append(_row(item.name, cells, style="cyan"))
        lines.append(Text())
        for item in held:
            first = f"{item.name.ljust(_NAMES)}  "
            lines += wrap(item.words, width=width, indent=" " * len(first), first=first, style="dim")
        return lines

    return Sheet(draw)


def holdings(candidate: Candidate) -> tuple[Held, ...]:
    """Return over how many ranks one copy of the parameters, gradients and optimizer state is spread."""
    sharding = max(candidate.mesh.dp_shard, 1)
    stage = _zero_stage(candidate)
    if sharding == 1 and stage:
        # ZeRO without a shard axis spreads over the replicas.
        sharding = candidate.mesh.dp_replicate
    kinds = (("parameters", 3), ("gradients", 2), ("optimizer", 1))
    if candidate.strategy is Strategy.DP:
        copies = "copied from device 0 to every device for each step"
        return (
            Held("parameters", 1, copies),
            Held("gradients", 1, "one per device, added up on device 0"),
            Held("optimizer", 1, "on device 0 only"),
        )
    return tuple(_held(candidate.mesh, name, sharding if stage >= least else 1) for name, least in kinds)


def _held(mesh: Mesh, name: str, shards: int) -> Held:
    copies = mesh.num_data_ranks // shards
    parts = [f"cut into {mesh.pp} stages"] if mesh.pp > 1 else []
    parts += [f"split {mesh.tp} ways inside each layer"] if mesh.tp > 1 else []
    parts += [f"each of {shards:,} ranks holds 1/{shards}"] if shards > 1 else []
    if not parts:
        return Held(name, shards, "whole on every rank" if copies > 1 else "whole")
    parts += [f"{copies:,} copies"] if copies > 1 else []
    return Held(name, shards, ", ".join(parts))


def _zero_stage(candidate: Candidate) -> int:
    stages = {Strategy.ZERO1: 1, Strategy.ZERO2: 2, Strategy.FSDP: 3, Strategy.HSDP: 3}
    implied = 3 if candidate.mesh.dp_shard > 1 and candidate.zero_stage == 0 else candidate.zero_stage
    return stages.get(candidate.strategy, implied)


def _num_places(candidate: Candidate) -> int:
    """Return the ranks; for layers placed by hand in one process, the devices."""
    if candidate.strategy is Strategy.NAIVE:
        return max(len(candidate.stages), candidate.mesh.num_ranks)
    return candidate.mesh.num_ranks


def _title(candidate: Candidate) -> str:
    one_process = candidate.strategy in (Strategy.DP, Strategy.NAIVE)
    noun = "device" if one_process else "rank"
    places = plural(_num_places(candidate), noun)
    mesh = describe_mesh(candidate.mesh)
    return f"{candidate.name} on {places}" + (f": {mesh}" if " x " in mesh or candidate.mesh.pp > 1 else "")


def _shown_ranks(count: int, width: int) -> list[int | None]:
    """Return the ranks drawn; None stands for those left out."""
    room = max(2, min(SHOWN_RANKS, (width - _NAMES - 2) // (CELL + 2)))
    if count <= room:
        return list(range(count))
    return [*range(room - 2), None, count - 1]


def _row(name: str, cells: Sequence[str], *, style: str = "") -> Text:
    text = "  ".join(cell.ljust(CELL) for cell in cells)
    return Text.assemble(name.ljust(_NAMES) + "  ", (text, style))


def _heading(candidate: Candidate, rank: int | None) -> str:
    if rank is None:
        return "…"
    word = "device" if candidate.strategy in (Strategy.DP, Strategy.NAIVE) else "rank"
    return f"{word} {rank}"


def _coordinates(candidate: Candidate, rank: int) -> tuple[int, int, int]:
    """Return the pipeline stage, the place among the data ranks, and the place inside a shard group.

    Ranks are numbered with tp varying fastest, then cp, dp_shard, dp_replicate, pp.
    """
    mesh = candidate.mesh
    if candidate.strategy is Strategy.NAIVE:
        return rank, 0, 0
    data = rank // (mesh.tp * mesh.cp) % mesh.num_data_ranks
    return rank // (mesh.tp * mesh.cp * mesh.num_data_ranks), data, data % mesh.dp_shard


def _samples(candidate: Candidate, rank: int | None) -> str:
    if rank is None:
        return "…"
    parts = candidate.mesh.num_data_ranks
    if candidate.strategy is Strategy.NAIVE or parts == 1:
        return "all"
    return f"{_coordinates(candidate, rank)[1] + 1} of {parts}"


def _extents(candidate: Candidate, stage: int) -> list[tuple[float, float]]:
    """Return the parts of the model, by parameters, that a place in the pipeline holds."""
    if not candidate.stages:
        count = candidate.mesh.pp
        return [(stage / count, (stage + 1) / count)]
    sizes = [0] * (max(item.stage for item in candidate.stages) + 1)
    for item in candidate.stages:
        sizes[item.stage] += item.parameters
    total = max(sum(sizes), 1)
    places = len(sizes) if candidate.strategy is Strategy.NAIVE else candidate.mesh.pp
    held = range(stage, len(sizes), places)
    return [(sum(sizes[:i]) / total, sum(sizes[: i + 1]) / total) for i in held]


def _cell(candidate: Candidate, held: Held, rank: int | None) -> str:
    if rank is None:
        return "…"
    stage, data, shard = _coordinates(candidate, rank)
    if candidate.strategy is Strategy.DP:
        only_first = held.name == "optimizer" and rank > 0
        return "░" * CELL if only_first else "█" * CELL
    if held.shards > CELL:
        return f"1/{held.shards}"
    place = shard if candidate.mesh.dp_shard > 1 else data
    filled = "▒" if candidate.mesh.tp > 1 else "█"
    cell = ["░"] * CELL
    for start, stop in _extents(candidate, stage):
        size = (stop - start) / held.shards
        inner = start + (place * size if held.shards > 1 else 0.0)
        first = min(round(inner * CELL), CELL - 1)
        last = max(round((inner + size) * CELL), first + 1)
        cell[first:last] = filled * (last - first)
    return "".join(cell)
