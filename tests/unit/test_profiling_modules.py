"""Modules of unusual build are profiled without a real run, stay as they were, and still train."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from apportion.profiling import profile_module
from apportion.records import Method, Profile

LINEAR = 2 * 4 * 4 * 4
"""FLOPs of a 4 x 4 linear layer on four samples."""


def layer() -> nn.Linear:
    return nn.Linear(4, 4)


class Outside(nn.Module):
    """Uses a parameter that is not registered and an attribute that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lock = layer(), threading.Lock()
        self.factors = [nn.Parameter(torch.ones(4))]
        self.shift = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return self.layer(x) * self.factors[0] + self.shift


class Hooked(nn.Module):
    """Reads what hooks inside its blocks caught, so that no block may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(layer(), nn.ReLU()) for _ in range(5))
        self.caught: list[Tensor] = []
        for block in self.blocks:
            block[1].register_forward_hook(lambda module, args, out: self.caught.append(out))

    def forward(self, x: Tensor) -> Tensor:
        self.caught.clear()
        for block in self.blocks:
            x = block(x)
        return torch.stack(self.caught).sum(0)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 3 * ctx.saved_tensors[0] ** 2


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x: Tensor) -> Tensor:
        return _Cube.apply(self.layer(x))


def profile(module: nn.Module, batch: Tensor, forward: Callable[[nn.Module, Any], Any]) -> Profile:
    return profile_module(
        module, batch, forward=forward, loss=lambda out, x: out.square().mean(), batch_samples=4, name="test"
    )


@pytest.mark.parametrize(
    ("build", "flops"),
    [
        (lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(layer())), LINEAR),
        (
            lambda: nn.Sequential(*(nn.utils.parametrizations.weight_norm(layer()) for _ in range(4))),
            4 * LINEAR,
        ),
        (Outside, LINEAR),
        (Hooked, 5 * LINEAR),
        (Custom, LINEAR),
        (lambda: nn.Sequential(layer(), nn.LayerNorm(4)).bfloat16(), LINEAR),
    ],
    ids=["spectral-norm", "weight-norm", "outside", "hooked", "custom-function", "bfloat16"],
)
def test_module_is_profiled_without_values(build: Callable[[], nn.Module], flops: int) -> None:
    module = build()
    batch = torch.randn(4, 4, dtype=next(module.parameters()).dtype)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    found = profile(module, batch, lambda m, x: m(x))
    assert found.method is Method.FAKE
    assert found.root.forward_flops == flops
    assert found.unused_parameters == ()
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    module(batch).square().mean().backward()
    assert all(p.grad is not None for p in module.parameters())


def test_a_custom_function_keeps_what_it_saves() -> None:
    found = profile(Custom(), torch.randn(4, 4), lambda m, x: m(x))
    assert found.root.saved_activation_bytes == 4 * 4 * 4


def test_a_method_other_than_forward_is_counted_on_what_it_calls() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer()

        def score(self, x: Tensor) -> Tensor:
            return self.layer(x)

    found = profile(Scores(), torch.randn(4, 4), lambda m, x: m.score(x))
    assert found.method is Method.FAKE
    assert (found.root.calls, found.root.forward_flops) == (0, LINEAR)
