"""The light rules answer what torch's own rules for meta tensors answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from apportion.profiling.operators import tensors_in
from apportion.profiling.shapes import COMPARE, IN_PLACE, RULES, UNARY, infer

B, S, D = 2, 5, 8


def meta(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def heads() -> Tensor:
    return meta(B, S, 4, D).transpose(1, 2)


def whole(*size: int) -> Tensor:
    return meta(*size, dtype=torch.int64)


CASES: dict[str, list[Callable[[], tuple[Any, ...]]]] = {
    **{name: [lambda: (meta(B, S, D),), lambda: (heads(),), lambda: (heads()[..., :3],)] for name in UNARY},
    **{
        name: [
            lambda: (meta(B, S, D), meta(B, S, D)),
            lambda: (meta(B, S, D), meta(D)),
            lambda: (meta(S, 1), meta(B, 1, D)),
            lambda: (heads(), heads()),
            lambda: (meta(B, S), meta()),
        ]
        for name in ("add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum", "minimum")
    },
    **{name: [lambda: (meta(B, S), 2.0), lambda: (heads(), 3)] for name in ("mul.Tensor", "pow.Tensor_Scalar")},
    **{f"{name}.Scalar": [lambda: (whole(B, S), 2), lambda: (meta(B, S), 0.5)] for name in COMPARE},
    **{f"{name}.Tensor": [lambda: (whole(B, S), whole(S))] for name in COMPARE},
    "rsub.Scalar": [lambda: (meta(B, S), 1.0)],
    "where.self": [lambda: (meta(B, 1, S, dtype=torch.bool), meta(B, D, S), meta())],
    "masked_fill.Scalar": [lambda: (meta(B, 4, S, S), meta(S, S, dtype=torch.bool), -1.0)],
    "clone": [lambda: (heads(),), lambda: (meta(B, S),)],
    "mm": [lambda: (meta(S, D), meta(D, 3)), lambda: (meta(S, D), meta(3, D).t())],
    "bmm": [lambda: (meta(B, S, D), meta(B, D, 3))],
    "addmm": [lambda: (meta(3), meta(S, D), meta(D, 3))],
    "native_layer_norm": [lambda: (meta(B, S, D), [D], meta(D), meta(D), 1e-5)],
    "native_layer_norm_backward": [
        lambda: (
            meta(B, S, D),
            meta(B, S, D),
            [D],
            meta(B, S, 1),
            meta(B, S, 1),
            meta(D),
            meta(D),
            [True, True, False],
        )
    ],
    "native_batch_norm": [
        lambda: (meta(B, 3, S, S), meta(3), meta(3), meta(3), meta(3), True, 0.1, 1e-5),
        lambda: (meta(B, 3, S, S), meta(3), meta(3), meta(3), meta(3), False, 0.1, 1e-5),
    ],
    "native_batch_norm_backward": [
        lambda: (
            meta(B, 3, S, S),
            meta(B, 3, S, S),
            meta(3),
            meta(3),
            meta(3),
            meta(3),
            meta(3),
            True,
            1e-5,
            [True, True, True],
        )
    ],
    "convolution": [
        lambda: (meta(B, 4, 9, 7), meta(6, 4, 3, 3), meta(6), [2, 1], [1, 0], [1, 2], False, [0, 0], 1),
        lambda: (meta(B, 4, 9), meta(4, 1, 3), None, [1], [1], [1], False, [0], 4),
    ],
    "convolution_backward": [
        lambda: (
            meta(B, 6, 4, 4),
            meta(B, 4, 6, 6),
            meta(6, 4, 3, 3),
            [6],
            [1, 1],
            [0, 0],
            [1, 1],
            False,
            [0, 0],
            1,
            [True, True, True],
        )
    ],
    "embedding": [lambda: (meta(10, D), whole(B, S))],
    "embedding_dense_backward": [lambda: (meta(B, S, D), whole(B, S), 10, -1, False)],
    "_softmax": [lambda: (meta(B, S), -1, False)],
    "_log_softmax": [lambda: (meta(B, S), 1, False)],
    "_softmax_backward_data": [lambda: (meta(B, S), meta(B, S), -1, torch.float32)],
    "_log_softmax_backward_data": [lambda: (meta(B, S), meta(B, S), -1, torch.float32)],
    "gelu_backward": [lambda: (meta(B, S), meta(B, S))],
    "silu_backward": [lambda: (meta(B, S), meta(B, S))],
    "tanh_backward": [lambda: (meta(B, S), meta(B, S))],
    "sigmoid_backward": [lambda: (meta(B, S), meta(B, S))],
    "threshold_backward": [lambda: (meta(B, S), meta(B, S), 0)],
    "nll_loss_forward": [
        lambda: (meta(S, D), whole(S), None, 1, -100),
        lambda: (meta(S, D), whole(S), None, 0, -100),
    ],
    "nll_loss_backward": [lambda: (meta(), meta(S, D), whole(S), None, 1, -100, meta())],
    "sum.dim_IntList": [
        lambda: (meta(B, S, D), [0, -1]),
        lambda: (meta(B, S, D), [1], True),
        lambda: (meta(B, S), None),
    ],
    "mean.dim": [lambda: (meta(B, S, D), [-1], True)],
    "sum": [lambda: (meta(B, S),)],
    "mean": [lambda: (meta(B, S),)],
    "cat": [lambda: ([meta(B, S), meta(B, 3)], 1), lambda: ([heads(), heads()], -1)],
    "stack": [lambda: ([meta(B, S)] * 3, 0), lambda: ([heads()] * 3, 2)],
    "_unsafe_view": [lambda: (meta(B, S, D), [B * S, D])],
    "unsafe_split.Tensor": [lambda: (meta(B, S, D), 3, 2)],
    "slice_backward": [lambda: (meta(B, 2), [B, S], 1, 0, 2, 1)],
    "select_backward": [lambda: (meta(B), [B, S], 1, 0)],
    "new_empty_strided": [lambda: (meta(B), [2, 3], [1, 2])],
    "new_zeros": [lambda: (meta(B), [2, 3])],
    "new_ones": [lambda: (meta(B), [2, 3])],
    "new_empty": [lambda: (meta(B), [2, 3])],
    "new_full": [lambda: (meta(B), [2, 3], 1.0)],
    "zeros_like": [lambda: (heads(),), lambda: (whole(B),)],
    "ones_like": [lambda: (heads(),)],
    "empty_like": [lambda: (heads(),)],
    "native_dropout": [lambda: (meta(B, S), 0.1, True)],
    "native_dropout_backward": [lambda: (meta(B, S), meta(B, S, dtype=torch.bool), 1.1)],
    "_scaled_dot_product_flash_attention_for_cpu": [
        lambda: (heads(), heads(), heads()),
        lambda: (meta(B, 4, S, D), meta(B, 4, S, D), meta(B, 4, S, D)),
    ],
    "_scaled_dot_product_flash_attention_for_cpu_backward": [
        lambda: (heads(), heads(), heads(), heads(), heads(), meta(B, 4, S), 0.0, False)
    ],
    **{
        name: [lambda: (meta(B, S), 0.5)]
        for name in IN_PLACE
        if name.endswith(("Scalar", "float")) and not name.startswith("masked")
    },
    **{name: [lambda: (meta(B, S), meta(S))] for name in ("add_.Tensor", "sub_.Tensor", "mul_.Tensor")},
    **{name: [lambda: (meta(B, S),)] for name in ("relu_", "sigmoid_", "tanh_", "silu_", "zero_")},
    "masked_fill_.Scalar": [lambda: (meta(B, S), meta(S, dtype=torch.bool), 0.0)],
}

FACTORIES: dict[str, tuple[Any, ...]] = {
    "zeros": ([2, 3],),
    "ones": ([2, 3],),
    "empty.memory_format": ([2, 3],),
    "arange": (5,),
    "arange.start": (2, 9),
    "arange.start_step": (2, 9, 2),
    "scalar_tensor": (1.0,),
}

UNTESTED = {
    "_safe_softmax": "the rule of _softmax",
    "div_.Tensor": "the rule of mul_.Tensor",
    "fill_.Tensor": "the rule of fill_.Scalar",
    "normal_": "the rule of bernoulli_.float",
    "uniform_": "the rule of bernoulli_.float",
    "add.Scalar": "the rule of mul.Tensor",
    "sub.Scalar": "the rule of mul.Tensor",
    "mul.Scalar": "the rule of mul.Tensor",
    "div.Scalar": "the rule of mul.Tensor",
    "_grouped_mm": "compared with a real product below",
    "_ctc_loss": "compared with a real loss below",
    "_ctc_loss.Tensor": "compared with a real loss below",
    "_ctc_loss_backward": "the form of the scores",
    "_ctc_loss_backward.Tensor": "the form of the scores",
}


def operator(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def form(value: Any) -> list[Any]:
    return [(tuple(t.shape), t.dtype, t.stride()) for t in tensors_in(value)]


@pytest.mark.parametrize("name", CASES)
def test_rule_equals_torchs(name: str) -> None:
    for make in CASES[name]:
        got = infer(name, make(), {})
        assert got is not NotImplemented
        assert form(got) == form(operator(name)(*make()))


@pytest.mark.parametrize("name", FACTORIES)
def test_factory_rule_equals_torchs(name: str) -> None:
    args = FACTORIES[name]
    expected = operator(name)(*args, device=torch.device("meta"))
    assert form(infer(name, args, {"device": torch.device("meta")})) == form(expected)


def test_every_rule_is_compared() -> None:
    assert set(RULES) == set(CASES) | set(FACTORIES) | set(UNTESTED)


def test_ctc_rule_equals_a_real_loss() -> None:
    scores, target = torch.randn(7, 2, 5), torch.randint(1, 5, (2, 3))
    for name, lengths in (
        ("_ctc_loss", ([7, 7], [3, 2])),
        ("_ctc_loss.Tensor", (torch.tensor([7, 7]), torch.tensor([3, 2]))),
    ):
        real = operator(name)(scores, target, *lengths)
        fake = infer(name, (scores.to("meta"), target, *lengths), {})
        assert [x[:2] for x in form(fake)] == [x[:2] for x in form(real)]


def test_grouped_product_rule_equals_a_real_product() -> None:
    rows, weights = torch.randn(6, 8), torch.randn(2, 8, 16)
    offsets = torch.tensor([2, 6], dtype=torch.int32)
    real = torch.ops.aten._grouped_mm(rows, weights, offsets)
    fake = infer("_grouped_mm", (rows.to("meta"), weights.to("meta"), offsets), {})
    assert form(fake) == form(real)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("mm", lambda: (meta(2, 3), meta(4, 5))),
        ("add.Tensor", lambda: (meta(2, 3), meta(4))),
        ("add_.Tensor", lambda: (meta(3), meta(2, 3))),
        ("cat", lambda: ([meta(2, 3), meta(3, 3)], 1)),
        ("div.Tensor", lambda: (whole(2), whole(2))),
        ("no_such_operator", lambda: (meta(2),)),
    ],
)
def test_what_is_not_plain_is_left_to_torch(name: str, args: Callable[[], tuple[Any, ...]]) -> None:
    assert infer(name, args(), {}) is NotImplemented
