"""A job file with `build() -> (module, args, kwargs, loss)`: one batch, to plan and to verify with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import TargetError
from ..torch_private import tree_flatten, tree_unflatten
from .calling import of_output_and_batch, pair_forward, require_arguments
from .functions import call_builder, missing_function, require_module
from .parts import Batch, JobParts
from .wording import describe_value

Dims = tuple[int | None, ...]


def read_one_batch(module: ModuleType, *, target: str, factory: str, seed: int) -> JobParts:
    """Return the parts of a file whose `factory` gives a module and its only batch, here `(args, kwargs)`.

    Raises: TargetError if it raises or returns something else.
    """
    build = getattr(module, factory, None)
    if not callable(build):
        raise missing_function(module, factory, target)
    require_arguments(build, factory, "")
    name = f"{factory}() of {module.__file__ or module.__name__}"
    _, args, kwargs, loss = _built(build, name, seed)
    batch = (tuple(args), dict(kwargs))
    dims = batch_dims_of(batch, getattr(module, "BATCH_DIMS", None))
    stem = (module.__file__ or module.__name__).rsplit("/", 1)[-1].removesuffix(".py")
    return JobParts(
        name=stem if factory == "build" else f"{stem}:{factory}",
        target=target,
        model=lambda: _built(build, name, seed)[0],
        example=lambda n: first_samples(batch, dims, n),
        forward=pair_forward,
        loss=of_output_and_batch(loss, "the loss of build()"),
        batch_dims=dims,
        one_batch=True,
    )


def _built(build: Callable[[], Any], name: str, seed: int) -> tuple[nn.Module, Any, Any, Callable[..., Any]]:
    built = call_builder(build, name=name, seed=seed)
    if not isinstance(built, tuple | list) or len(built) != 4:
        raise TargetError(f"{name} should return (module, args, kwargs, loss)", found=describe_value(built))
    module, args, kwargs, loss = built
    require_module(module, name)
    if not isinstance(args, tuple | list) or not isinstance(kwargs, Mapping) or not callable(loss):
        raise TargetError(
            f"{name} should return (module, args, kwargs, loss)",
            found=f"args {type(args).__name__}, kwargs {type(kwargs).__name__}, loss {type(loss).__name__}",
            try_="args a tuple, kwargs a dict, loss a function of the output",
        )
    return module, args, kwargs, loss


def batch_dims_of(batch: Batch, declared: Any) -> Dims | None:
    """Return the batch axis of each leaf of `(args, kwargs)` in pytree order; None is a leaf that is not split.

    `declared` is BATCH_DIMS: `{"args": (...), "kwargs": {...}}`, each entry an axis, None, or a structure of
    them as the argument has. What it leaves out has axis 0. Without a declaration the answer is None as soon
    as the leaves disagree on the number of samples along axis 0: the axes are then to be found.

    Raises: TargetError if the declaration does not fit the batch.
    """
    args, kwargs = batch
    declared_args = (declared or {}).get("args", ())
    declared_kwargs = (declared or {}).get("kwargs", {})
    if not isinstance(declared_args, list | tuple) or not isinstance(declared_kwargs, Mapping):
        raise TargetError("BATCH_DIMS should be {'args': (...), 'kwargs': {...}}", found=repr(declared))
    unknown = [key for key in declared_kwargs if key not in kwargs]
    if unknown or len(declared_args) > len(args):
        raise TargetError(
            "BATCH_DIMS names inputs that build() does not give",
            found=f"{len(declared_args)} args and kwargs {list(declared_kwargs)}; "
            f"build() gives {len(args)} args and kwargs {list(kwargs)}",
        )
    dims: list[int | None] = []
    for i, arg in enumerate(args):
        dims += _leaf_dims(arg, declared_args[i] if i < len(declared_args) else 0, f"args[{i}]")
    for key, value in kwargs.items():
        dims += _leaf_dims(value, declared_kwargs.get(key, 0), f"kwargs['{key}']")
    sizes = _sizes(batch, tuple(dims))
    if len(set(sizes)) > 1 and declared is None:
        return None
    if len(set(sizes)) > 1:
        raise TargetError(
            "the inputs of build() disagree on the number of samples along BATCH_DIMS",
            found=f"sizes {sizes} in {describe_value(batch)}",
            try_="give None for an input that is not split",
        )
    return tuple(dims)


def _leaf_dims(value: Any, declared: Any, path: str) -> list[int | None]:
    if isinstance(value, Mapping) and isinstance(declared, Mapping):
        return [
            dim for key in value for dim in _leaf_dims(value[key], declared.get(key, 0), f"{path}[{key!r}]")
        ]
    nested = isinstance(value, list | tuple) and isinstance(declared, list | tuple)
    if nested and len(value) == len(declared):
        pairs = zip(value, declared, strict=True)
        return [dim for i, (one, its) in enumerate(pairs) for dim in _leaf_dims(one, its, f"{path}[{i}]")]
    if isinstance(declared, bool) or not (declared is None or isinstance(declared, int)):
        raise TargetError(
            f"BATCH_DIMS for {path} does not fit it", found=f"{declared!r} for {describe_value(value)}"
        )
    leaves, _ = tree_flatten(value)
    return [_leaf_dim(leaf, declared, path) for leaf in leaves]


def _leaf_dim(leaf: Any, dim: int | None, path: str) -> int | None:
    if isinstance(leaf, torch.Tensor):
        if dim is None or leaf.ndim == 0:
            return None
        if not -leaf.ndim <= dim < leaf.ndim:
            raise TargetError(f"BATCH_DIMS gives axis {dim} for {path}", found=describe_value(leaf))
        return dim % leaf.ndim
    return dim if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type) else None


def _sizes(batch: Batch, dims: Dims) -> list[int]:
    leaves, _ = tree_flatten(batch)
    pairs = zip(leaves, dims, strict=True)
    return [leaf.shape[dim] for leaf, dim in pairs if dim is not None and isinstance(leaf, torch.Tensor)]


def num_samples(batch: Batch, dims: Dims | None) -> int:
    """Return the samples of a batch along its axes; without axes, those of its first tensor along axis 0."""
    if dims is not None:
        return max(_sizes(batch, dims), default=0)
    tensors = [leaf for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor) and leaf.ndim]
    return tensors[0].shape[0] if tensors else 0


def first_samples(batch: Batch, dims: Dims | None, n: int) -> Batch:
    """Return a copy of the first `n` samples, or of all where there are fewer or the axes are not known."""
    leaves, form = tree_flatten(batch)
    whole = dims is None or n >= max(_sizes(batch, dims), default=0) or _has_dataclass(leaves)
    axes = [None] * len(leaves) if whole or dims is None else list(dims)
    return tree_unflatten([_copy(leaf, axis, n) for leaf, axis in zip(leaves, axes, strict=True)], form)


def _has_dataclass(leaves: list[Any]) -> bool:
    """Say whether a leaf may hold tensors inside; who splits those must know its fields."""
    return any(dataclasses.is_dataclass(leaf) and not isinstance(leaf, type) for leaf in leaves)


def _copy(leaf: Any, axis: int | None, n: int) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    part = leaf if axis is None else leaf.narrow(axis, 0, n)
    return part.detach().clone().requires_grad_(leaf.requires_grad)
