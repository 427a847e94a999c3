"""The form of a call: equal texts for calls that cost the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def signature(tree: Any) -> str:
    """Return a text that is equal for arguments of the same form: shapes, types, gradients, plain values."""
    if isinstance(tree, Tensor):
        grad = "g" if tree.requires_grad else ""
        return f"{str(tree.dtype).removeprefix('torch.')}{list(tree.shape)}{grad}"
    if isinstance(tree, Mapping):
        return "{" + ",".join(f"{key}:{signature(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, list | tuple):
        return "(" + ",".join(signature(value) for value in tree) + ")"
    if tree is None or isinstance(tree, bool | int | float | str):
        return repr(tree)
    return type(tree).__qualname__
