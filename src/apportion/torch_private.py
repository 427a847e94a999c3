"""The only file that may import a torch name that is private.

Each function says what it relies on; `tests/unit/test_torch_private.py` holds a test for each, so that a new
torch that changed one is found by a name and not by a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree


def tree_flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a nested structure and its form, which `tree_unflatten` takes.

    Relies on `torch.utils._pytree.tree_flatten`: tuples, lists, dicts (in insertion order), named tuples,
    ordered and default dicts, deques and classes registered there are nodes; everything else is a leaf, plain
    dataclasses included. The second value is equal (`==`) for structures of the same form.
    """
    return _pytree.tree_flatten(tree)


def tree_unflatten(leaves: list[Any], form: Any) -> Any:
    """Return the nested structure of `form` that holds `leaves`.

    Relies on `torch.utils._pytree.tree_unflatten`.
    """
    return _pytree.tree_unflatten(leaves, form)


def tree_map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Return `tree` with `fn` applied to every leaf; leaves of further trees of its form are added arguments.

    Relies on `torch.utils._pytree.tree_map`.
    """
    return _pytree.tree_map(fn, tree, *rest)
