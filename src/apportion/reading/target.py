"""From a TARGET of the command line to the parts of its job."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Final

from ..errors import OptionError, TargetError
from .files import import_dotted, import_file, source_digest
from .functions import read_functions
from .hf import read_hf
from .one_batch import read_one_batch
from .parts import JobParts
from .wording import nearest

FORMS: Final = "file.py, file.py:function, package.module or hf:PATH"
# Names kept for models that will come with the package.
RECIPES: Final = ("gpt", "bert", "llama", "vit", "resnet", "vgg", "wav2vec2", "deepspeech2")
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def read_target(
    target: str, *, overrides: Mapping[str, str] | None = None, seq_len: int | None = None, seed: int = 0
) -> JobParts:
    """Return the functions of a job, defaults filled in.

    `overrides` are `--set` pairs: constants of a job file, or values of a configuration. `seq_len` is the
    tokens per sample of a configuration's batches; a job file has its own. The model is built, and the data
    read, with every random source seeded by `seed`, and the sources put back afterwards.

    Raises: TargetError or OptionError that say what was wrong, what was found and what to do.
    """
    sets = dict(overrides or {})
    if target.startswith("hf:"):
        return read_hf(target.removeprefix("hf:"), overrides=sets, seq_len=seq_len, seed=seed)
    if target in RECIPES and not Path(target).exists():
        raise TargetError(
            f"the recipe '{target}' is not available in this version",
            try_=f"give {FORMS}; the config.json of a {target} model works as hf:PATH",
        )
    place, _, factory = target.partition(":")
    module = _module(Path(place), sets) if _is_path(place) else import_dotted(_dotted(place), sets)
    parts = _read_module(module, target=target, factory=factory, seed=seed)
    if seq_len is not None and seq_len != parts.tokens_per_sample:
        raise OptionError(
            f"--seq-len {seq_len} is for hf: targets",
            found=f"the samples of {place} have {parts.tokens_per_sample or 'no'} tokens",
            try_="set the length in the job file, or its constant with --set NAME=VALUE",
        )
    return dataclasses.replace(parts, fingerprint=source_digest(Path(module.__file__ or place), sets))


def _is_path(place: str) -> bool:
    return place.endswith(".py") or "/" in place or (place != "" and Path(place).exists())


def _dotted(place: str) -> str:
    if not _DOTTED.fullmatch(place):
        raise TargetError(f"'{place}' is not a target", try_=f"give {FORMS}")
    return place


def _module(path: Path, sets: Mapping[str, str]) -> ModuleType:
    if path.is_dir():
        config = " (it holds a config.json: hf:PATH)" if (path / "config.json").exists() else ""
        raise TargetError(f"{path} is a folder", try_=f"give {FORMS}{config}")
    if not path.exists():
        there = [one.name for one in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise TargetError(
            f"no file {path}", found=f"looked in {Path.cwd()}", try_=_advice(path, there) or f"give {FORMS}"
        )
    if path.suffix != ".py":
        config = f"hf:{path}" if path.suffix == ".json" else FORMS
        raise TargetError(f"{path} is not a Python file", try_=f"give {config}")
    return import_file(path, sets)


def _advice(path: Path, there: list[str]) -> str:
    advice = nearest(path.name, there)
    return advice if advice.startswith("did you mean") else ""


def _read_module(module: ModuleType, *, target: str, factory: str, seed: int) -> JobParts:
    """Choose the form: `build()` makes a one-batch job, unless there is a `model()` too."""
    one_batch = hasattr(module, "build") and not hasattr(module, "model") and not hasattr(module, "data")
    if one_batch:
        return read_one_batch(module, target=target, factory=factory or "build", seed=seed)
    return read_functions(module, target=target, factory=factory or "model", seed=seed)
