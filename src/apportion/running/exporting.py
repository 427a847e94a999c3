"""The whole model as safetensors files, laid out as Hugging Face lays them out.

    PATH/model.safetensors                                      up to 5 GB
    PATH/model-00001-of-00003.safetensors, ... and PATH/model.safetensors.index.json      beyond

A PATH that ends in .safetensors names the file itself. Tensors under several names are written once; the
file's metadata maps the other names to the one that was kept, as `safetensors.torch.save_model` does.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from ..errors import OptionError
from ..units import format_bytes
from .checkpoint_files import write_durably
from .together import gather_on_first, on_first_rank, own_rank

# The default `max_shard_size="5GB"` (decimal) of huggingface_hub's split_torch_state_dict_into_shards.
MAX_SHARD_BYTES = 5 * 10**9
_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Which names go into which file, and which other names stand for one of them."""

    files: tuple[tuple[str, tuple[str, ...]], ...]
    aliases: Mapping[str, str]
    total_bytes: int


def export_safetensors(
    path: Path, state: Mapping[str, torch.Tensor], *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> tuple[Path, ...]:
    """Write the full tensors of `state` on rank 0 and return the files; collective, all ranks hold all names.

    Sharded tensors are gathered one by one; no more than one file's worth is held at once, on rank 0.
    Raises: OptionError on every rank if the files cannot be written.
    """
    directory, stem = (path.parent, path.name[: -len(_SUFFIX)]) if path.suffix == _SUFFIX else (path, "model")
    names = gather_on_first(tuple(state))
    layout = on_first_rank(lambda: _lay_out(stem, state, names, max_shard_bytes))
    for file, kept in layout.files:
        full = {name: tensor for name, tensor in _gathered(state, kept) if tensor is not None}
        on_first_rank(partial(_write, directory / file, full, layout))
    return on_first_rank(lambda: _finish(directory, stem, layout))


def _lay_out(
    stem: str, state: Mapping[str, torch.Tensor], names: list[tuple[str, ...]], max_shard_bytes: int
) -> _Layout:
    for rank, other in enumerate(names):
        if other != names[0]:
            difference = sorted(set(other) ^ set(names[0])) or ["their order"]
            raise ValueError(f"rank {rank} and rank 0 differ in {difference[0]}")
    aliases = _find_aliases(state)
    shards: list[list[str]] = [[]]
    filled = total = 0
    for name in state:
        if name in aliases:
            continue
        size = state[name].numel() * state[name].element_size()
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled, total = filled + size, total + size
    count = len(shards)
    titles = (
        [f"{stem}{_SUFFIX}"]
        if count == 1
        else [f"{stem}-{i:05}-of-{count:05}{_SUFFIX}" for i in range(1, count + 1)]
    )
    files = tuple((title, tuple(shard)) for title, shard in zip(titles, shards, strict=True))
    return _Layout(files=files, aliases=aliases, total_bytes=total)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _find_aliases(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return, for each name whose tensor has an earlier name, that name."""
    first: dict[tuple[object, ...], str] = {}
    aliases = {}
    for name, tensor in state.items():
        local = _local(tensor)
        if not local.numel():
            continue
        place = (local.device, local.data_ptr(), tensor.dtype, tuple(tensor.shape), local.stride())
        kept = first.setdefault(place, name)
        if kept != name:
            aliases[name] = kept
    return aliases


def _gathered(
    state: Mapping[str, torch.Tensor], names: tuple[str, ...]
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield the full tensors in CPU memory of their own on rank 0, and None elsewhere."""
    for name in names:
        tensor = state[name].detach()
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        yield name, _own_copy(full) if own_rank() == 0 else None


def _own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous CPU tensor that shares its memory with nothing else in the file."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _write(path: Path, tensors: dict[str, torch.Tensor], layout: _Layout) -> None:
    metadata = {"format": "pt"} | {other: kept for other, kept in layout.aliases.items() if kept in tensors}
    beside = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file(tensors, beside, metadata=metadata)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except (OSError, SafetensorError) as error:
        raise OptionError(
            f"the model of {format_bytes(layout.total_bytes)} cannot be written to {path}",
            found=str(error),
            try_="free space there, or give another path",
        ) from error


def _finish(directory: Path, stem: str, layout: _Layout) -> tuple[Path, ...]:
    """Write the index of several files and remove files of an earlier export under the same name."""
    written = [directory / file for file, _ in layout.files]
    index = directory / f"{stem}{_SUFFIX}.index.json"
    if len(written) > 1:
        places = {name: file for file, names in layout.files for name in names}
        text = json.dumps(
            {"metadata": {"total_size": layout.total_bytes}, "weight_map": places}, indent=2, sort_keys=True
        )
        write_durably(index, text + "\n")
        written.append(index)
    numbered = re.compile(rf"{re.escape(stem)}-\d{{5}}-of-\d{{5}}{re.escape(_SUFFIX)}")
    earlier = (path for path in directory.iterdir() if numbered.fullmatch(path.name))
    for path in itertools.chain(earlier, (directory / f"{stem}{_SUFFIX}", index)):
        if path not in written:
            path.unlink(missing_ok=True)
    return tuple(written)
