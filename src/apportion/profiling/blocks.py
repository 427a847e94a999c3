"""Where a model is cut, wrapped and checkpointed: its repeated layers and what stands beside them.

Note [cut level]
From the root downwards: the items of a list of equal modules are blocks; a module that holds such a list
further down is opened, its other children are blocks as they are. A list counts when at least half of its
items (two or more) are built alike and it carries a twentieth of the model; so does a list of one. Without
any such list, modules that carry more than a quarter of the model are opened. Parameters that an opened
module holds itself belong to no block; they stay with the root.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import nn

REPEATED_SHARE = 0.05
OPENED_SHARE = 0.25


class _Tree:
    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        fingerprints: Mapping[str, str],
        weights: Mapping[str, float],
    ) -> None:
        self.modules = modules
        self.fingerprints = fingerprints
        self.weights = weights
        self.children: dict[str, list[str]] = {name: [] for name in modules}
        for name in modules:
            if name:
                self.children[name.rpartition(".")[0]].append(name)
        self.opens = dict.fromkeys(modules, False)
        for name in reversed(list(modules)):
            below = any(self.opens[child] or self.repeated(child) for child in self.children[name])
            self.opens[name] = below

    def repeated(self, name: str) -> bool:
        """Return whether `name` is a list of modules that are built alike."""
        items = self.children[name]
        if not isinstance(self.modules[name], nn.ModuleList | nn.Sequential) or not items:
            return False
        if self.weights[name] < REPEATED_SHARE or not any(self.children[item] for item in items):
            return False
        most = Counter(self.fingerprints[item] for item in items).most_common(1)[0][1]
        if len(items) == 1:
            return isinstance(self.modules[name], nn.ModuleList)
        return most > 1 and most * 2 >= len(items)


def cut_level(
    modules: Mapping[str, nn.Module], fingerprints: Mapping[str, str], weights: Mapping[str, float]
) -> tuple[str, ...]:
    """Return the fqns of the blocks, in the order of the tree. See Note [cut level].

    `modules` in pre-order; `weights` gives each module's part of the model, 0 to 1.
    """
    tree = _Tree(modules, fingerprints, weights)
    repeats = tree.repeated("") or tree.opens[""]
    return tuple(_cut(tree, "", repeats=repeats))


def _cut(tree: _Tree, name: str, *, repeats: bool) -> Sequence[str]:
    children = tree.children[name]
    if not children:
        return [name]
    if tree.repeated(name):
        return children
    opened = tree.opens[name] if repeats else tree.weights[name] > OPENED_SHARE
    if name and not opened:
        return [name]
    return [block for child in children for block in _cut(tree, child, repeats=repeats)]
