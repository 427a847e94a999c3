"""Where models are cut, and what makes two modules equal."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from apportion.profiling.blocks import cut_level
from apportion.profiling.fingerprint import fingerprints


class Layer(nn.Module):
    def __init__(self, width: int, index: int = 0, *, experts: int = 0) -> None:
        super().__init__()
        self.index = index
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        if experts:
            self.experts = nn.ModuleList(Layer(2 * width) for _ in range(experts))


class Stage(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(width, i) for i in range(depth))
        self.merge = nn.Linear(width, 2 * width)


def tree(**children: nn.Module) -> nn.Module:
    root = nn.Module()
    for name, child in children.items():
        root.add_module(name, child)
    return root


def cut(root: nn.Module) -> list[str]:
    modules = dict(root.named_modules())
    total = sum(p.numel() for p in root.parameters())
    weights = {name: sum(p.numel() for p in m.parameters()) / total for name, m in modules.items()}
    return list(cut_level(modules, fingerprints(modules), weights))


def layers(width: int, count: int, *, experts: int = 0) -> nn.ModuleList:
    return nn.ModuleList(Layer(width, i, experts=experts) for i in range(count))


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        (
            tree(
                words=nn.Embedding(99, 8), body=tree(h=layers(8, 3), norm=nn.LayerNorm(8)), head=nn.Linear(8, 2)
            ),
            ["words", "body.h.0", "body.h.1", "body.h.2", "body.norm", "head"],
        ),
        (
            tree(stages=nn.ModuleList(Stage(8 * 2**i, 2) for i in range(2))),
            [f"stages.{i}.{name}" for i in range(2) for name in ("blocks.0", "blocks.1", "merge")],
        ),
        (tree(h=layers(8, 3, experts=8)), ["h.0", "h.1", "h.2"]),
        (tree(h=layers(8, 1), head=nn.Linear(8, 2)), ["h.0", "head"]),
        (tree(a=nn.ModuleList(nn.Linear(4, 4) for _ in range(3))), ["a.0", "a.1", "a.2"]),
        (
            tree(
                features=nn.Sequential(nn.Conv2d(3, 9, 3), nn.ReLU(), nn.Conv2d(9, 9, 3)), head=nn.Linear(9, 2)
            ),
            ["features.0", "features.1", "features.2", "head"],
        ),
        (tree(small=tree(a=nn.Linear(2, 2)), large=nn.Linear(99, 99)), ["small", "large"]),
        (tree(h=layers(64, 2), tiny=nn.Sequential(Layer(1), Layer(1))), ["h.0", "h.1", "tiny"]),
        (nn.Linear(3, 3), [""]),
    ],
    ids=[
        "gpt",
        "stages",
        "experts",
        "one-layer",
        "linears",
        "no-repeats",
        "small-sibling",
        "tiny-list",
        "leaf",
    ],
)
def test_cut_level(root: nn.Module, expected: list[str]) -> None:
    found = cut(root)
    assert found == expected
    held = [id(p) for name in found for p in root.get_submodule(name).parameters()]
    assert len(held) == len(set(held)) == len(list(root.parameters()))


def prints(root: nn.Module) -> Mapping[str, str]:
    return fingerprints(dict(root.named_modules()))


def test_positions_do_not_tell_modules_apart() -> None:
    found = prints(tree(h=layers(8, 4)))
    assert len({found[f"h.{i}"] for i in range(4)}) == 1


class Scaled(Layer):
    def __init__(self, scale: float = 1.0, extra: Tensor | None = None) -> None:
        super().__init__(8)
        self.scale = scale
        if extra is not None:
            self.register_buffer("extra", extra)


@pytest.mark.parametrize(
    "other",
    [
        Layer(8),
        Scaled(2.0),
        Scaled(1.0, torch.zeros(1)),
        Scaled().double(),
        Scaled().requires_grad_(False),
    ],
    ids=["class", "setting", "buffer", "dtype", "frozen"],
)
def test_what_tells_modules_apart(other: nn.Module) -> None:
    found = prints(nn.Sequential(Scaled(), Scaled(), other))
    assert found["0"] == found["1"] != found["2"]
