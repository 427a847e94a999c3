"""Checkpoints on PyTorch's distributed checkpoint (DCP), for any layout and number of ranks.

A state is a nested mapping of tensors, DTensors and small picklable objects. Ranks may hold different keys:
what only one rank has is saved by it, what several have is saved once. An object (or a plain tensor) under one
key must be the same on every rank that has it; what belongs to a rank goes under a key of its own.
All ranks must see the same file system. Loading unpickles objects: load only checkpoints you trust.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from ..errors import OptionError, TargetError
from ..records.codec import SCHEMA, from_json_text, to_json_text
from ..units import format_bytes
from .checkpoint_files import (
    META,
    FileSum,
    check_file,
    damaged,
    latest_checkpoint,
    make_beside,
    move_into_place,
    remove_older,
    sum_file,
    write_durably,
)
from .together import count_ranks, gather_on_first, on_every_rank, on_first_rank, own_rank

__all__ = [
    "CheckpointMeta",
    "Kind",
    "hash_parameters",
    "latest_checkpoint",
    "load_checkpoint",
    "read_kinds",
    "read_meta",
    "save_checkpoint",
]

State = Mapping[str, object]

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NAMES_SHOWN = 6
_METADATA = ".metadata"  # DCP's table of contents


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMeta:
    """What a checkpoint says about itself; `meta.json` in its directory.

    `fingerprint` is the model's, `parameters` the hash of parameter names, shapes and types
    (`hash_parameters`). `loader` is the data loader's `state_dict()`, `schedule` the learning-rate schedule's
    where it has a JSON form. `step` and `files` are filled in by `save_checkpoint`.
    """

    step: int = 0
    epoch: int = 0
    world_size: int = 1
    strategy: str = ""
    fingerprint: str = ""
    parameters: str = ""
    loader: Mapping[str, int | bool | None] = field(default_factory=dict)
    schedule: Mapping[str, object] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    files: tuple[FileSum, ...] = ()
    schema: int = SCHEMA


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A value of the state and where it sits."""

    container: Any
    key: Any
    value: object


@dataclass(frozen=True, slots=True)
class Kind:
    """What must agree between a saved value and the one to load into.

    The global shape and the type of a tensor, None for an object; `bytes` is the size of the whole tensor.
    """

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    bytes: int = 0

    def __str__(self) -> str:
        return "object" if self.shape is None else f"{self.dtype}{list(self.shape)}".removeprefix("torch.")


def hash_parameters(named: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return a hash of names, global shapes and types, whatever their order and sharding."""
    lines = sorted(f"{name} {tuple(tensor.shape)} {tensor.dtype}" for name, tensor in named)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def save_checkpoint(root: Path, *, step: int, state: State, meta: CheckpointMeta, keep: int = 2) -> Path:
    """Write `root/step-N` and return it; collective over the default process group, if there is one.

    The files are written beside and moved into place when they are durable; `root/latest` is moved last, and
    only then are checkpoints beyond the newest `keep` removed.
    Raises: OptionError on every rank if it cannot be written; the earlier checkpoints stay as they were.
    """
    leaves = _flatten(state)
    needed = _needed_bytes(leaves)
    with _disk_errors(root, needed):
        beside = on_first_rank(lambda: _prepare(root, step, needed))
        try:
            return _save(beside, leaves, replace(meta, step=step), keep=keep)
        except BaseException:
            if own_rank() == 0:
                shutil.rmtree(beside, ignore_errors=True)
            raise


def load_checkpoint(path: Path, state: dict[str, object]) -> CheckpointMeta:
    """Fill `state` in place from the checkpoint at `path`; collective, as `save_checkpoint` is.

    Tensors keep their identity, layout and device; objects are replaced in their mapping or list. The number
    of ranks and the sharding may differ from those of saving.
    Raises: TargetError on every rank if the files are damaged or belong to another model; `state` is then
    unchanged, unless reading itself failed.
    """
    meta = on_first_rank(lambda: read_meta(path))
    on_every_rank(lambda: _check_files(path, meta))
    leaves = _flatten(state)
    kinds = gather_on_first({key: _kind(leaf.value) for key, leaf in leaves.items()})
    on_first_rank(lambda: _check_same_model(path, _merge_kinds(kinds)))
    values: dict[str, Any] = {
        key: leaf.value if _is_tensor(leaf.value) else None for key, leaf in leaves.items()
    }
    try:
        with _quiet():
            dcp_load(
                values,
                storage_reader=FileSystemReader(path),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            )
    except CheckpointException as error:
        rank, cause = _first_failure(error)
        raise damaged(path / META, f"rank {rank} could not read it: {cause}") from error
    for key, leaf in leaves.items():
        if not _is_tensor(leaf.value):
            leaf.container[leaf.key] = values[key]
    return meta


def read_meta(path: Path) -> CheckpointMeta:
    """Return what the checkpoint at `path` says about itself.

    Raises: TargetError if there is none, or its `meta.json` cannot be read.
    """
    file = path / META
    if not file.is_file():
        found = "the directory is unfinished or of something else" if path.is_dir() else "no such directory"
        raise TargetError(f"no checkpoint at {path}", found=found, try_="give a run's checkpoints/step-N")
    try:
        return from_json_text(CheckpointMeta, file.read_text(encoding="utf-8"))
    except (OptionError, UnicodeDecodeError) as error:
        raise damaged(file, str(error)) from error


def read_kinds(path: Path) -> dict[str, Kind]:
    """Return what the checkpoint at `path` holds, by dotted key; for a state that is made to fit it.

    Raises: TargetError if there is none, or what it says of itself is damaged.
    """
    for file in read_meta(path).files:
        if file.name == _METADATA:
            check_file(path, file)
    kinds = {}
    for key, saved in FileSystemReader(path).read_metadata().state_dict_metadata.items():
        if isinstance(saved, TensorStorageMetadata):
            dtype = saved.properties.dtype
            kinds[key] = Kind(tuple(saved.size), dtype, saved.size.numel() * dtype.itemsize)
        else:
            kinds[key] = Kind()
    return kinds


def _save(beside: Path, leaves: dict[str, _Leaf], meta: CheckpointMeta, *, keep: int) -> Path:
    values = {key: leaf.value for key, leaf in leaves.items()}
    writer = FileSystemWriter(beside)
    writer.fs = _TellingFiles()
    with _quiet():
        dcp_save(
            values,
            storage_writer=writer,
            planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        )
    names = on_first_rank(lambda: sorted(file.name for file in beside.iterdir()))
    sums = on_every_rank(lambda: [sum_file(beside / name) for name in names[own_rank() :: count_ranks()]])
    files = tuple(sorted((item for part in sums for item in part), key=lambda item: item.name))
    return on_first_rank(lambda: _publish(beside, replace(meta, files=files), keep))


def _publish(beside: Path, meta: CheckpointMeta, keep: int) -> Path:
    root = beside.parent
    write_durably(beside / META, to_json_text(meta))
    final = move_into_place(beside, meta.step)
    remove_older(root, meta.step, keep)
    return final


def _prepare(root: Path, step: int, needed: int) -> Path:
    beside = make_beside(root, step)
    free = shutil.disk_usage(root).free
    if free < needed:
        beside.rmdir()
        raise _disk_full(root, needed, f"{format_bytes(free)} free")
    return beside


def _disk_full(root: Path, needed: int, found: str) -> OptionError:
    return OptionError(
        f"the checkpoint of {format_bytes(needed)} cannot be written to {root}",
        found=f"{found}; it needs at least {needed} bytes. Earlier checkpoints are unchanged",
        try_="free space there, keep fewer checkpoints, or give another run directory",
    )


@contextmanager
def _disk_errors(root: Path, needed: int) -> Iterator[None]:
    """Turn what the disk refuses into an OptionError that says what was needed and how much is free."""
    try:
        yield
    except CheckpointException as error:
        rank, cause = _first_failure(error)
        raise _not_written(root, needed, f"rank {rank}: {type(cause).__name__}: {cause}", cause) from error
    except OSError as error:
        raise _not_written(root, needed, str(error), error) from error


def _not_written(root: Path, needed: int, found: str, cause: BaseException) -> OptionError:
    if isinstance(cause, OSError) and cause.errno in _DISK_ERRORS:
        return _disk_full(root, needed, f"{found}, {shutil.disk_usage(root).free} bytes free")
    return OptionError(
        f"the checkpoint cannot be written to {root}",
        found=found,
        try_="make the directory writable, or give another run directory",
    )


class _TellingFiles(FileSystem):
    """DCP's file system, but a refused write stays an OSError.

    torch's archive writer fails with a position error of its own after one, and the chain from that to the
    OSError does not survive the way to the other ranks.
    """

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except RuntimeError as error:
            link: BaseException | None = error
            while link is not None and not isinstance(link, OSError):
                link = link.__cause__ or link.__context__
            if link is None:
                raise
            raise OSError(*link.args) from error


def _first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    rank = min(error.failures)
    return rank, error.failures[rank][0]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the two things DCP says about how it is meant to be used here."""
    with warnings.catch_warnings():
        # One process without a process group is a case of its own, not an oversight.
        warnings.filterwarnings(
            "ignore", r"torch\.distributed is (disabled|unavailable), unavailable or uninitialized", UserWarning
        )
        yield


def _is_tensor(value: object) -> bool:
    """Return whether DCP stores `value` piece by piece; other layouts (sparse) are pickled whole."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _holds_tensor(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, list):
        return any(map(_holds_tensor, value))
    return _is_tensor(value)


def _flatten(state: State) -> dict[str, _Leaf]:
    """Return the leaves by dotted key. Mappings are entered always, lists only for the tensors in them."""
    leaves: dict[str, _Leaf] = {}

    def enter(container: Mapping[Any, object] | list[Any], prefix: str) -> None:
        items = container.items() if isinstance(container, Mapping) else enumerate(container)
        for key, value in items:
            name = f"{prefix}{key}"
            if isinstance(value, Mapping) or (isinstance(value, list) and _holds_tensor(value)):
                enter(value, f"{name}.")
                continue
            if name in leaves:
                raise ValueError(f"two entries of the state have the key {name}")
            leaves[name] = _Leaf(container, key, value)

    enter(state, "")
    return leaves


def _kind(value: object) -> Kind:
    if not isinstance(value, torch.Tensor) or not _is_tensor(value):
        return Kind()
    return Kind(tuple(value.shape), value.dtype, value.numel() * value.element_size())


def _merge_kinds(parts: Iterable[Mapping[str, Kind]]) -> dict[str, Kind]:
    merged: dict[str, Kind] = {}
    for rank, part in enumerate(parts):
        for key, kind in part.items():
            if merged.setdefault(key, kind) != kind:
                raise ValueError(f"{key} is {kind} on rank {rank} and {merged[key]} on an earlier one")
    return merged


def _needed_bytes(leaves: Mapping[str, _Leaf]) -> int:
    """Return on every rank the bytes of all tensors of all ranks, each counted once."""
    kinds = gather_on_first({key: _kind(leaf.value) for key, leaf in leaves.items()})
    return on_first_rank(lambda: sum(kind.bytes for kind in _merge_kinds(kinds).values()))


def _check_files(path: Path, meta: CheckpointMeta) -> None:
    """Check this rank's share of the files."""
    for expected in meta.files[own_rank() :: count_ranks()]:
        check_file(path, expected)


def _check_same_model(path: Path, wanted: Mapping[str, Kind]) -> None:
    saved = read_kinds(path)
    problems = []
    if missing := sorted(wanted.keys() - saved.keys()):
        problems.append(f"not in the checkpoint: {_shown(missing)}")
    if unexpected := sorted(saved.keys() - wanted.keys()):
        problems.append(f"in the checkpoint only: {_shown(unexpected)}")
    different = [
        f"{key} ({saved[key]} saved, {wanted[key]} here)"
        for key in sorted(wanted.keys() & saved.keys())
        if saved[key] != wanted[key]
    ]
    if different:
        problems.append(f"different: {_shown(different)}")
    if problems:
        raise TargetError(
            f"{path} is a checkpoint of another model",
            found="; ".join(problems),
            try_="give the model, optimizer and options it was made with, or another run directory",
        )


def _shown(names: list[str]) -> str:
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
