"""Finding the batch dims, and whether collating parts equals collating the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset, default_collate

from apportion.errors import TargetError
from apportion.running.data import collate_depends_on_batch, find_batch_dims

LENGTHS = [torch.arange(size) for size in (3, 5, 2, 4)]
PAIRS = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))


def pad(items: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = torch.nn.utils.rnn.pad_sequence(items, batch_first=True)
    return {"tokens": tokens, "mask": tokens > 0}


def time_first(items: list[torch.Tensor]) -> tuple[torch.Tensor, int, torch.Tensor]:
    return torch.nn.utils.rnn.pad_sequence(items), 7, torch.eye(2)


def noisy(items: list[Any]) -> torch.Tensor:
    stacked = torch.stack([item[0] for item in items])
    return stacked + torch.rand_like(stacked)


def centred(items: list[Any]) -> torch.Tensor:
    stacked = torch.stack([item[0] for item in items])
    return stacked - stacked.mean(0)


def named(items: list[Any]) -> dict[str, Any]:
    return {"name": [str(item[1]) for item in items], "x": torch.stack([item[0] for item in items])}


def test_batch_dims_of_nested_batches() -> None:
    items = [{"a": (1, torch.zeros(3, 3)), "b": 2.0}, {"a": (2, torch.zeros(3, 3)), "b": 1.0}]
    assert find_batch_dims(default_collate, items) == (0, 0, 0)
    assert find_batch_dims(pad, LENGTHS) == (0, 0)
    assert find_batch_dims(time_first, LENGTHS) == (1, None, None)


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (torch.cat, r"leaf 0 .*no axis[^~]*\(9,\) for 3 samples and \(6,\) for 2"),
        (lambda items: torch.zeros(len(items), len(items)), "leaf 0 .*no axis"),
        (lambda items: [torch.zeros(1)] * len(items), "structure"),
        (lambda items: ["text"] * len(items), "list of strings"),
    ],
)
def test_batches_that_cannot_be_split_are_named(collate: Any, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        find_batch_dims(collate, LENGTHS)


@pytest.mark.parametrize(
    ("dataset", "collate", "expected"),
    [
        (PAIRS, default_collate, False),
        (PAIRS, named, False),
        (PAIRS, noisy, True),
        (PAIRS, centred, True),
        (LENGTHS, pad, True),
        (LENGTHS, time_first, True),
        ([torch.ones(3)] * 4, pad, False),
        (LENGTHS, torch.cat, True),
        ([torch.ones(3)], pad, False),
    ],
)
def test_dependence_on_the_batch(dataset: Any, collate: Any, expected: bool) -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert collate_depends_on_batch(dataset, collate, 4) is expected
    assert torch.equal(before, torch.get_rng_state())


def test_a_long_sample_far_behind_is_seen() -> None:
    assert collate_depends_on_batch([torch.ones(3)] * 90 + [torch.ones(4)] * 10, pad, 10)


def test_an_iterator_is_not_used_up() -> None:
    iterator = iter(LENGTHS)
    assert collate_depends_on_batch(iterator, default_collate, 4)
    assert len(list(iterator)) == 4
