"""Every function of `torch_private` does what its docstring relies on."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from apportion import torch_private

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Plain:
    value: int


def test_tree_flatten_keeps_insertion_order_and_leaves_dataclasses_whole() -> None:
    plain = Plain(1)
    leaves, form = torch_private.tree_flatten({"b": (1, [2, None]), "a": Pair("x", plain)})
    assert leaves == [1, 2, None, "x", plain]
    _, same = torch_private.tree_flatten({"b": (5, [6, 7]), "a": Pair(8, 9)})
    _, other = torch_private.tree_flatten({"b": (5, [6]), "a": Pair(8, 9)})
    assert form == same
    assert form != other


def test_tree_unflatten_is_the_inverse() -> None:
    tree = {"b": (1, [2, 3]), "a": Pair(4, {"c": 5})}
    leaves, form = torch_private.tree_flatten(tree)
    assert torch_private.tree_unflatten(leaves, form) == tree
    assert torch_private.tree_unflatten([leaf + 1 for leaf in leaves], form) != tree


def test_tree_map_takes_several_trees() -> None:
    assert torch_private.tree_map(lambda leaf, other: leaf * other, {"a": (2, 3)}, {"a": (5, 7)}) == {
        "a": (10, 21)
    }
    with pytest.raises(ValueError):  # noqa: PT011 - torch's own message is not ours to pin
        torch_private.tree_map(lambda leaf, other: leaf, {"a": (2, 3)}, {"a": (5,)})


def test_hidden_worker_info_hides_and_restores() -> None:
    class Sees(IterableDataset[tuple[bool, bool, bool]]):
        def __iter__(self) -> Iterator[tuple[bool, bool, bool]]:
            before = get_worker_info() is None
            with torch_private.hidden_worker_info():
                inside = get_worker_info() is None
            yield before, inside, get_worker_info() is None

    (seen,) = DataLoader(Sees(), batch_size=None, num_workers=1)
    assert list(seen) == [False, True, False]


def test_compiled_original_is_the_module_that_was_compiled() -> None:
    module = nn.Linear(2, 2)
    assert torch_private.compiled_original(torch.compile(module, backend="eager")) is module
    assert torch_private.compiled_original(module) is None
    assert torch_private.compiled_original(nn.Sequential(module)) is None


def test_light_dispatch_mode_is_called_as_written() -> None:
    class Light(torch_private.LightDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Wrapped(torch_private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    assert not hasattr(Light.__torch_dispatch__, "__wrapped__")
    assert hasattr(Wrapped.__torch_dispatch__, "__wrapped__")
    with Light():  # type: ignore[no-untyped-call]
        assert torch.ones(2).sum().item() == 2


def test_sequence_numbers_lead_from_a_backward_to_its_forward() -> None:
    x = torch.ones(3, requires_grad=True)
    before = torch_private.forward_sequence_number()
    y = x * 2
    between = torch_private.forward_sequence_number()
    z = y.sum()
    after = torch_private.forward_sequence_number()
    assert before < between < after
    seen: list[int | None] = []

    class Watch(torch_private.LightDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mul.Tensor:
                seen.append(torch_private.backward_sequence_number())
            return func(*args, **(kwargs or {}))

    with Watch():  # type: ignore[no-untyped-call]
        z.backward()
    assert len(seen) == 1
    assert seen[0] is not None
    assert before <= seen[0] < between
    assert torch_private.backward_sequence_number() is None


def test_hooks_after_accumulation_are_seen() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    assert not torch_private.has_hooks_after_accumulation(parameter)
    handle = parameter.register_post_accumulate_grad_hook(lambda p: None)
    assert torch_private.has_hooks_after_accumulation(parameter)
    handle.remove()
    assert not torch_private.has_hooks_after_accumulation(parameter)


def test_multiply_all_is_in_place() -> None:
    held = [torch.ones(3), torch.full((2, 2), 4.0)]
    torch_private.multiply_all(held, 0.5)
    assert torch.equal(held[0], torch.full((3,), 0.5))
    assert torch.equal(held[1], torch.full((2, 2), 2.0))
