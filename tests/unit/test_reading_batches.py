"""One-batch jobs: `build()`, and the batch axis of each leaf."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from apportion.errors import TargetError
from apportion.reading import check_batch, num_samples, read_target
from apportion.reading.one_batch import batch_dims_of, first_samples

BUILD = """
import torch
from torch import nn

BATCH_DIMS = {"args": (0,), "kwargs": {"y": 0}}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 2)
    def forward(self, x, y=None):
        return self.lin(x), y

def loss(out):
    return nn.functional.cross_entropy(*out)

def build():
    torch.manual_seed(0)
    return Net(), (torch.randn(6, 3),), {"y": torch.arange(6) % 2}, loss
"""


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_file(text: str) -> str:
        path = tmp_path / "case.py"
        path.write_text(text)
        return str(path)

    return write_file


def test_build_gives_one_batch_of_arguments(write: Any) -> None:
    parts = read_target(write(BUILD))
    batch = parts.example(99)
    args, kwargs = batch
    assert parts.one_batch
    assert parts.data is None
    assert parts.batch_dims == (0, 0)
    assert (args[0].shape, list(kwargs)) == ((6, 3), ["y"])
    assert num_samples(batch, parts.batch_dims) == 6
    whole = check_batch(parts, parts.model(), batch)
    part = check_batch(parts, parts.model(), parts.example(2))
    assert whole != part
    assert parts.example(2)[1]["y"].tolist() == [0, 1]


def test_each_model_is_fresh_and_equal(write: Any) -> None:
    parts = read_target(write(BUILD))
    first, second = parts.model(), parts.model()
    assert first is not second
    assert torch.equal(first.lin.weight, second.lin.weight)  # type: ignore[union-attr, arg-type]
    with torch.no_grad():
        first.lin.weight.zero_()  # type: ignore[union-attr, operator]
    assert bool(second.lin.weight.any())  # type: ignore[union-attr, operator]


def test_an_example_is_a_copy(write: Any) -> None:
    parts = read_target(write(BUILD))
    parts.example(99)[0][0].zero_()
    assert bool(parts.example(99)[0][0].any())


def test_a_factory_takes_the_place_of_build(write: Any) -> None:
    text = BUILD + "\ndef other():\n    m, a, k, l = build()\n    return m, (a[0][:3],), {'y': k['y'][:3]}, l\n"
    assert num_samples(read_target(write(text) + ":other").example(99), (0, 0)) == 3


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (', {"y": torch.arange(6) % 2}, loss', ", loss", "should return (module, args, kwargs, loss)"),
        ("return Net(), (torch.randn(6, 3),)", "return Net(), torch.randn(6, 3)", "should return (module,"),
        ("return Net(),", "return Net,", "returned no nn.Module"),
        ("    torch.manual_seed(0)", "    raise KeyError('x')", "build() of"),
        ('"y": 0}}', '"z": 0}}', "BATCH_DIMS names inputs that build() does not give"),
        ('{"args": (0,), "kwargs"', '{"args": (0, 0), "kwargs"', "BATCH_DIMS names inputs"),
        ('{"args": (0,), "kwargs"', '{"args": (1,), "kwargs"', "disagree on the number of samples"),
        ('{"args": (0,), "kwargs"', '{"args": (2,), "kwargs"', "BATCH_DIMS gives axis 2 for args[0]"),
        ('{"args": (0,), "kwargs"', '{"args": ("a",), "kwargs"', "BATCH_DIMS for args[0] does not fit"),
        ('{"args": (0,), "kwargs": {"y": 0}}', '{"args": 0}', "BATCH_DIMS should be"),
        ("def build():", "def build(n):", "should be callable as build()"),
    ],
)
def test_a_build_that_cannot_be_used(write: Any, old: str, new: str, what: str) -> None:
    assert old in BUILD
    with pytest.raises(TargetError) as caught:
        read_target(write(BUILD.replace(old, new)))
    assert what in caught.value.what


Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Plain:
    x: torch.Tensor


X, T = torch.zeros(4, 3), torch.zeros(3, 4)


@pytest.mark.parametrize(
    ("batch", "declared", "dims"),
    [
        (((X,), {}), None, (0,)),
        (((X, "mode", 3), {"scale": 2.0}), None, (0, None, None, None)),
        (((T, X), {}), {"args": (1, 0)}, (1, 0)),
        (((T, X), {}), {"args": (-1,)}, (1, 0)),
        (((X, X), {"k": X}), {"args": (None,), "kwargs": {"k": None}}, (None, 0, None)),
        ((((X, T), {"a": T, "b": X}), {}), {"args": ((0, 1), {"a": 1})}, (0, 1, 1, 0)),
        (((Pair(X, T),), {}), {"args": ((0, 1),)}, (0, 1)),
        (((X, torch.zeros(())), {}), None, (0, None)),
        (((Plain(X), 1), {}), None, (0, None)),
        ((((X, X), "relu"), {}), {"args": (0, None)}, (0, 0, None)),
        (((X, T), {}), None, None),
    ],
)
def test_batch_dims_follow_the_leaves(batch: Any, declared: Any, dims: Any) -> None:
    assert batch_dims_of(batch, declared) == dims


def test_first_samples_cuts_each_leaf_along_its_axis() -> None:
    batch = ((torch.arange(12).reshape(4, 3), torch.arange(12).reshape(3, 4), "mode"), {})
    (rows, columns, mode), _ = first_samples(batch, (0, 1, None), 2)
    assert rows.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert columns.tolist() == [[0, 1], [4, 5], [8, 9]]
    assert mode == "mode"
    assert first_samples(batch, None, 2)[0][0].shape == (4, 3)
    assert first_samples(((Plain(X),), {}), (0,), 2)[0][0].x.shape == (4, 3)
