"""A job file of functions: `model()`, `data(split)`, `loss(output, batch)` and the optional ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import default_collate

from ..errors import ApportionError, TargetError
from ..torch_private import tree_flatten
from .calling import default_forward, of_output_and_batch, require_arguments
from .parts import Batch, JobParts
from .seeding import seeded
from .wording import describe_value, last_line, nearest

JOB_FUNCTIONS = {
    "model": "",
    "data": "split",
    "optimizer": "params",
    "schedule": "optimizer",
    "collate": "items",
    "forward": "model, batch",
}


def read_functions(module: ModuleType, *, target: str, factory: str, seed: int) -> JobParts:
    """Return the parts of a job file; `factory` is the name of its model function.

    Raises: TargetError if a function is missing or cannot be called as it will be.
    """
    found = _functions(module, target, factory)
    name = module.__file__ or module.__name__
    data = _seeded_data(found["data"], f"data() of {name}", seed)
    collate = found.get("collate", default_collate)
    example = _example(data, collate, name)
    return JobParts(
        name=_short_name(module, factory),
        target=target,
        model=_seeded_model(found[factory], f"{factory}() of {name}", seed),
        example=example,
        forward=found.get("forward", default_forward),
        loss=of_output_and_batch(found["loss"], "loss") if "loss" in found else None,
        data=data,
        collate=collate,
        optimizer=found.get("optimizer"),
        schedule=found.get("schedule"),
        metrics=of_output_and_batch(found["metrics"], "metrics") if "metrics" in found else None,
        tokens_per_sample=_tokens_per_sample(example),
    )


def _functions(module: ModuleType, target: str, factory: str) -> dict[str, Callable[..., Any]]:
    names = {*JOB_FUNCTIONS, "loss", "metrics", factory}
    found = {name: getattr(module, name) for name in names if callable(getattr(module, name, None))}
    for name in (factory, "data"):
        if name not in found:
            raise missing_function(module, name, target)
    for name, function in found.items():
        if name in JOB_FUNCTIONS or name == factory:
            require_arguments(function, name, JOB_FUNCTIONS.get(name, ""))
    return found


def missing_function(module: ModuleType, name: str, target: str) -> TargetError:
    """Return the error for a job file without a function that it needs."""
    there = [
        key
        for key, value in vars(module).items()
        if callable(value)
        and not key.startswith("_")
        and not isinstance(value, type)
        and getattr(value, "__module__", "") == module.__name__
    ]
    shape = {"data": "data(split), which returns a dataset", "model": "model(), which returns an nn.Module"}
    return TargetError(
        f"{target.split(':')[0]} has no function {name}()",
        found=f"functions: {', '.join(sorted(there)) or 'none'}",
        try_=f"{nearest(name, there)}" if nearest(name, there).startswith("did") else _add(name, shape),
    )


def _add(name: str, shapes: Mapping[str, str]) -> str:
    return f"add {shapes.get(name, name + '()')}, or name the model function: file.py:function"


def _short_name(module: ModuleType, factory: str) -> str:
    stem = (module.__file__ or module.__name__).rsplit("/", 1)[-1].removesuffix(".py")
    return stem if factory == "model" else f"{stem}:{factory}"


def _seeded_model(build: Callable[[], Any], name: str, seed: int) -> Callable[[], nn.Module]:
    def model() -> nn.Module:
        return require_module(call_builder(build, name=name, seed=seed), name)

    return model


def call_builder(build: Callable[[], Any], *, name: str, seed: int) -> Any:
    """Return `build()`, seeded.

    Errors under `torch.device("meta")` pass as they are: who builds without weights has another way then.

    Raises: TargetError for any other error of the user's code.
    """
    with seeded(seed):
        if torch.get_default_device().type == "meta":
            return build()
        return call_user(build, name=name)


def require_module(built: Any, name: str) -> nn.Module:
    """Return a built model.

    Raises: TargetError if it is not an `nn.Module`.
    """
    if not isinstance(built, nn.Module):
        raise TargetError(
            f"{name} returned no nn.Module", found=describe_value(built), try_="return the model that it builds"
        )
    return built


def call_user(function: Callable[..., Any], *args: Any, name: str) -> Any:
    """Return `function(*args)`; what the user's code raises becomes an error that says where.

    Raises: TargetError.
    """
    try:
        return function(*args)
    except ApportionError:
        raise
    except Exception as error:  # the user's code may raise anything; it is told, with its place
        raise TargetError(
            f"{name} raised", found=last_line(error), try_="see the whole traceback with -v"
        ) from error


def _seeded_data(build: Callable[[str], Any], name: str, seed: int) -> Callable[[str], Any]:
    """Return `data(split)`; it builds a map-style dataset once, and an iterable, which may be used up, anew."""
    built: dict[str, Any] = {}

    def data(split: str) -> Any:
        if split in built:
            return built[split]
        with seeded(seed):
            dataset = call_user(build, split, name=name)
        _check_dataset(dataset, split, name)
        if hasattr(dataset, "__getitem__"):
            built[split] = dataset
        return dataset

    return data


def _check_dataset(dataset: Any, split: str, name: str) -> None:
    if dataset is None and split != "train":
        return
    if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__iter__"):
        raise TargetError(
            f"{name} returned no dataset for '{split}'",
            found=describe_value(dataset),
            try_="return a Dataset, a list or another iterable of samples",
        )
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        raise TargetError(
            f"{name} is empty for '{split}'",
            found="0 samples",
            try_="check the path and the split that it reads",
        )


def _example(
    data: Callable[[str], Any], collate: Callable[[list[Any]], Batch], name: str
) -> Callable[[int], Batch]:
    def example(n: int) -> Batch:
        items = call_user(_first, data("train"), n, name=f"a sample of data('train') of {name}")
        if not items:
            raise TargetError(
                f"data() of {name} gives no sample for 'train'",
                try_="check the path and the split that it reads",
            )
        return collate_items(collate, items)

    return example


def _first(dataset: Any, n: int) -> list[Any]:
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return [dataset[i] for i in range(min(n, len(dataset)))]
    return list(itertools.islice(iter(dataset), n))


def collate_items(collate: Callable[[list[Any]], Batch], items: list[Any]) -> Batch:
    """Return the batch of samples.

    Raises: TargetError that shows the samples, if they cannot be put together.
    """
    try:
        return collate(items)
    except Exception as error:  # default_collate and the user's collate raise many kinds
        shown = " and ".join(describe_value(item) for item in items[:2])
        raise TargetError(
            "the samples cannot be put together into a batch",
            found=f"{shown}; {last_line(error)}",
            try_="return tensors of one shape from data(), or define collate(items) in the job file",
        ) from error


def _tokens_per_sample(example: Callable[[int], Batch]) -> int:
    """Return the length of the samples where they are sequences of integers, else 0."""
    leaves, _ = tree_flatten(example(1))
    lengths = [leaf.shape[1] for leaf in leaves if _is_tokens(leaf)]
    return max(lengths, default=0)


def _is_tokens(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.ndim == 2 and leaf.dtype in (torch.int64, torch.int32)
