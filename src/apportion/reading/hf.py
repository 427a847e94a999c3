"""A Hugging Face configuration as a target: the model built from it, with random batches of its kind.

No weights are read: `hf:PATH` is a `config.json` or the folder that holds one. The model computes its own loss.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from ..errors import OptionError, TargetError
from .calling import default_forward
from .files import parse_literal
from .functions import call_builder, require_module
from .hf_batches import batch_maker, sequence_length
from .hf_files import config_file, hf_fingerprint
from .parts import JobParts
from .wording import last_line, nearest

# Tried in this order where `architectures` is missing or names a class without a loss.
_AUTO_CLASSES: Final = (
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForImageClassification",
    "AutoModelForCTC",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForSequenceClassification",
    "AutoModelForAudioClassification",
)


def read_hf(path: str, *, overrides: Mapping[str, str], seq_len: int | None, seed: int) -> JobParts:
    """Return the parts of a Hugging Face configuration.

    Raises: TargetError if transformers is missing or the configuration cannot be used; OptionError for an
    override that it does not have or a sequence that is longer than the model's positions.
    """
    file = config_file(path)
    if importlib.util.find_spec("transformers") is None:
        raise TargetError(
            f"hf:{path} needs the transformers package", try_="pip install 'apportion[hf]' (or transformers)"
        )
    config = _config(file, overrides)
    build = _builder(config, file)
    length = sequence_length(config, seq_len)
    make = batch_maker(build.cls, config, length, seed)

    name = f"{build.cls.__name__} of {file}"

    def model() -> nn.Module:
        return require_module(call_builder(build, name=name, seed=seed), name)

    return JobParts(
        name=file.parent.name or str(config.model_type),
        target=f"hf:{path}",
        model=model,
        example=make,
        forward=default_forward,
        loss=None,
        tokens_per_sample=length if build.cls.main_input_name == "input_ids" else 0,
        fingerprint=hf_fingerprint(file, overrides, seq_len),
    )


def _config(file: Path, overrides: Mapping[str, str]) -> Any:
    """Return the configuration with its overrides; sizes that follow from others are worked out anew."""
    from transformers import AutoConfig

    try:
        data = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise TargetError(f"{file} is not a JSON document", found=str(error)) from error
    kind = data.pop("model_type", None) if isinstance(data, dict) else None
    if not kind:
        raise TargetError(
            f"{file} is not a Hugging Face configuration",
            found="it has no model_type",
            try_="give a config.json",
        )
    base = _made(lambda: AutoConfig.for_model(kind, **data), file)
    for name, text in overrides.items():
        _override(data, base, name, text)
    config = _made(lambda: AutoConfig.for_model(kind, **data), file)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # training keeps no keys and values for generation
    return config


def _made(make: Callable[[], Any], file: Path) -> Any:
    try:
        return make()
    except Exception as error:  # configurations check themselves with errors of many kinds
        raise TargetError(
            f"{file} is not a configuration that the installed transformers can read",
            found=last_line(error),
            try_="compare its model_type and values with the model's documentation, or update transformers",
        ) from error


def _override(data: dict[str, Any], base: Any, name: str, text: str) -> None:
    """Put `name=text` into the data of a configuration; `name` may have dots for nested ones."""
    *parents, leaf = name.split(".")
    for parent in parents:
        base = getattr(base, parent, None)
        data = data.setdefault(parent, {}) if isinstance(data, dict) else {}
    names = {**base.to_dict(), **dict(getattr(base, "attribute_map", {}))} if base is not None else {}
    if leaf not in names:
        raise OptionError(
            f"--set {name}={text}: the configuration has no such value",
            try_=nearest(leaf, names, kind="values"),
        )
    alias = dict(getattr(base, "attribute_map", {})).get(leaf, leaf)
    data[alias] = parse_literal(name, text, getattr(base, leaf, None))


class _Builder:
    """Builds the model of a configuration, in float32 whatever type its published weights have."""

    def __init__(self, cls: Any, config: Any) -> None:
        self.cls = cls
        self.config = config

    def __call__(self) -> Any:
        return self.cls(copy.deepcopy(self.config))


def _builder(config: Any, file: Path) -> _Builder:
    """Choose the class: the one that `architectures` names, or one with a loss that holds it."""
    import transformers

    named = [str(name) for name in getattr(config, "architectures", None) or ()]
    for name in named:
        cls = getattr(transformers, name, None)
        if cls is None:
            raise TargetError(
                f"the installed transformers {transformers.__version__} has no class {name}",
                found=f"architectures in {file}",
                try_="update transformers, or write a job file with a model() function",
            )
        if "labels" in inspect.signature(cls.forward).parameters:
            return _Builder(cls, config)
    for auto in _AUTO_CLASSES:
        try:
            with torch.device("meta"):
                model = getattr(transformers, auto).from_config(copy.deepcopy(config))
        except ValueError:  # "Unrecognized configuration class ... for this kind of AutoModel"
            continue
        if not named or any(type(module).__name__ in named for module in model.modules()):
            return _Builder(type(model), config)
    raise TargetError(
        f"no model with a loss is known for {file}",
        found=f"model_type {config.model_type}, architectures {named or 'not given'}",
        try_="write a job file with model(), data() and loss()",
    )
