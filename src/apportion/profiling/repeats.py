"""Run two of many equal blocks and answer for the others.

The second block is the one whose numbers are copied: what all blocks share, such as a mask, is kept by the
first. A block that writes to itself while it runs (an auxiliary loss, a counter), is hooked from outside or
shares parameters with the rest of the model is always run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_private import tree_flatten, tree_unflatten
from .forms import empty
from .operators import tensors_in
from .signatures import signature

RUNS = 2
"""Blocks of one kind that are really run."""


class _Answer(torch.autograd.Function):
    """Outputs of given forms that depend on the inputs, with gradients of the inputs' forms."""

    @staticmethod
    def forward(ctx: Any, forms: Any, *inputs: Tensor) -> Any:
        ctx.forms = [(x.shape, x.dtype) for x in inputs]
        outputs = tuple(empty(size, dtype, stride) for size, dtype, stride, _ in forms)
        ctx.mark_non_differentiable(*(out for out, form in zip(outputs, forms, strict=True) if not form[-1]))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (None, *(empty(size, dtype) for size, dtype in ctx.forms))


class _Kind:
    """Equal blocks called alike: which were run, and the form of what they returned."""

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.unsafe = False
        self.leaves: list[Any] = []
        self.kept: list[bool] = []
        self.form: Any = None


class Repeats:
    """The equal blocks of one run. `sources` gives, for each block that was answered for, the one copied."""

    def __init__(self, modules: Mapping[str, nn.Module], fingerprints: Mapping[str, str]) -> None:
        self.sources: dict[int, int] = {}
        self._modules = list(modules.values())
        self._keys = _candidates(modules, fingerprints)
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self._open: list[tuple[_Kind, dict[int, dict[str, Any]]]] = []
        self._calls: Counter[int] = Counter()
        self._answered: Counter[int] = Counter()

    @property
    def mixed(self) -> bool:
        """Whether a block that was copied, or answered for, was called more than once: copying is not exact."""
        return any(
            self._answered[index] != 1 or self._calls[index] or self._calls[source] != 1
            for index, source in self.sources.items()
        )

    def replay(self, index: int, args: Any, kwargs: Any) -> tuple[bool, Any, list[Tensor]]:
        """Answer for block `index` without running it, where that is possible.

        Returns (True, output, the tensors of the output that the block itself would have kept for its
        backward), or (False, None, []) when the block has to run.
        """
        key = self._keys.get(index)
        if key is None:
            return False, None, []
        kind = self._kinds.setdefault((key, signature((args, kwargs))), _Kind())
        if index in kind.ran or len(kind.ran) < RUNS or kind.unsafe:
            self._calls[index] += 1
            if index not in kind.ran:
                kind.ran.append(index)
            self._open.append((kind, _attributes(self._modules[index])))
            return False, None, []
        self._answered[index] += 1
        self.sources[index] = kind.ran[RUNS - 1]
        out = _answer(kind, [t for t in tensors_in((args, kwargs)) if t.requires_grad])
        tensors = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, Tensor)]
        return True, out, [t for t, kept in zip(tensors, kind.kept, strict=True) if kept]

    def record(self, index: int, out: Any, kept: Callable[[Tensor], bool]) -> None:
        """Take down what block `index`, which just ran, returned; `kept` tells what autograd keeps already."""
        if index not in self._keys:
            return
        kind, before = self._open.pop()
        leaves, kind.form = tree_flatten(out)
        kind.leaves = [_leaf(leaf) for leaf in leaves]
        kind.kept = [kept(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        changed = _attributes(self._modules[index]) != before
        opaque = any(not isinstance(x, Tensor | bool | int | float | str | None) for x in leaves)
        kind.unsafe = kind.unsafe or not tensors or changed or opaque


def _candidates(modules: Mapping[str, nn.Module], fingerprints: Mapping[str, str]) -> dict[int, str]:
    """Return the keys of modules that have enough equals among their siblings and share nothing outside."""
    counts = Counter((name.rpartition(".")[0], fingerprints[name]) for name in modules if name)
    owners = Counter(
        id(parameter) for module in modules.values() for parameter in module.parameters(recurse=False)
    )
    index = {name: i for i, name in enumerate(modules)}
    keys = {}
    for name, module in modules.items():
        if not name or counts[name.rpartition(".")[0], fingerprints[name]] <= RUNS:
            continue
        tied = any(owners[id(parameter)] > 1 for parameter in module.parameters())
        if not tied and not _hooked_inside(module) and next(module.children(), None) is not None:
            keys[index[name]] = fingerprints[name]
    return keys


def _hooked_inside(module: nn.Module) -> bool:
    """Return whether a submodule has forward hooks of the user, which a block that is not run would miss."""
    return any(
        below is not module and (vars(below)["_forward_hooks"] or vars(below)["_forward_pre_hooks"])
        for below in module.modules()
    )


def _attributes(module: nn.Module) -> dict[int, dict[str, Any]]:
    """Return the identity of every attribute in the subtree; parameters and the like are containers."""
    return {
        i: {name: id(value) for name, value in vars(below).items()} for i, below in enumerate(module.modules())
    }


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return (value.shape, value.dtype, value.stride(), value.requires_grad)


def _answer(kind: _Kind, inputs: list[Tensor]) -> Any:
    forms = [leaf for leaf in kind.leaves if isinstance(leaf, tuple)]
    applied: Any = _Answer.apply
    answers = iter(applied(forms, *inputs) if inputs else _plain(forms))
    leaves = [next(answers) if isinstance(leaf, tuple) else leaf for leaf in kind.leaves]
    return tree_unflatten(leaves, kind.form)


def _plain(forms: list[Any]) -> list[Tensor]:
    return [
        empty(size, dtype, stride).requires_grad_(requires_grad) for size, dtype, stride, requires_grad in forms
    ]
