"""The only file that may import a torch name that is private.

Each function says what it relies on; `tests/unit/test_torch_private.py` holds a test for each, so that a new
torch that changed one is found by a name and not by a wrong answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils.data._utils import worker as _data_worker


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


def has_hooks_after_accumulation(parameter: torch.Tensor) -> bool:
    """Return whether `register_post_accumulate_grad_hook` was called on `parameter` (and not undone).

    Relies on the hooks being kept in `_post_accumulate_grad_hooks`.
    """
    return bool(parameter._post_accumulate_grad_hooks)


def compiled_original(module: nn.Module) -> nn.Module | None:
    """Return the module that `torch.compile` wrapped, or None for one that is not compiled.

    Relies on `torch._dynamo.OptimizedModule` holding it as its child `_orig_mod`.
    """
    children = dict(module.named_children())
    return children["_orig_mod"] if list(children) == ["_orig_mod"] else None


@contextmanager
def hidden_worker_info() -> Iterator[None]:
    """Let `torch.utils.data.get_worker_info()` answer None inside the context.

    Relies on `torch.utils.data._utils.worker._worker_info`, the variable that function returns.
    """
    saved = _data_worker._worker_info
    _data_worker._worker_info = None
    try:
        yield
    finally:
        _data_worker._worker_info = saved


class LightDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode whose `__torch_dispatch__` is called as written.

    Relies on `TorchDispatchMode._should_skip_dynamo`: when it answers True (the default) torch wraps the
    method so that its first call imports `torch._dynamo`, which takes about as long as importing torch.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def forward_sequence_number() -> int:
    """Return the number that the next autograd node made on this thread will carry.

    Relies on `torch.autograd._get_sequence_nr`, which grows by one with each node of the forward.
    """
    return int(torch._C._autograd._get_sequence_nr())


def backward_sequence_number() -> int | None:
    """Return the sequence number of the autograd node that is running now, None outside a backward.

    Relies on `torch._C._current_autograd_node` and on `Node._sequence_nr`.
    """
    node = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def multiply_all(tensors: list[torch.Tensor], factor: float) -> None:
    """Multiply every tensor by `factor` in place, in as few kernels as the device allows.

    Relies on `torch._foreach_mul_`, which torch's own gradient clipping uses.
    """
    torch._foreach_mul_(tensors, factor)
