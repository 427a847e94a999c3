"""The probe on kinds of modules that are easy to get wrong: the rule it finds, or why it refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apportion.applying import check_module
from apportion.batching import find_dims
from apportion.batching.forward import Functions
from apportion.errors import RefusedError, TargetError
from apportion.profiling.findings import Findings
from apportion.profiling.probe import Probe
from apportion.records import BufferRule, LossKind

Body = Callable[[nn.Linear, torch.Tensor], Any]


class Around(nn.Module):
    """One linear layer, and a body that says what is done with it."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.body = body

    def forward(self, x: torch.Tensor) -> Any:
        return self.body(self.linear, x)


def _probe(model: nn.Module, loss: Callable[..., Any], *batch: Any) -> Findings:
    functions = Functions(forward=lambda m, b: m(*b), loss=lambda out, b: loss(out, *b), own_loss=False)
    return Probe(model, batch, functions=functions, dims=find_dims(batch), seed=0).run()


def _reason(findings: Findings) -> str:
    assert findings.traits.refusal is not None
    return findings.traits.refusal.reason


def _square(out: torch.Tensor, *_: Any) -> torch.Tensor:
    return out.square().mean()


def _x(n: int = 6) -> torch.Tensor:
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    "count",
    [
        lambda mask: torch.count_nonzero(mask),
        lambda mask: mask.sum(dim=(0, 1)),
        lambda mask: mask.sum(0).sum(0),
    ],
    ids=["count_nonzero", "sum over dims", "sum of sums"],
)
def test_a_count_that_the_example_holds_constant_is_taken_over_the_whole_batch(
    count: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    def loss(out: torch.Tensor, _: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (out.square().sum(-1, keepdim=True) * mask).sum() / count(mask)

    model = Around(lambda linear, x: linear(x))
    functions = Functions(
        forward=lambda m, b: m(b[0]), loss=lambda out, b: loss(out, b[0], b[1]), own_loss=False
    )
    batch = (_x(), torch.ones(6, 1))
    findings = Probe(model, batch, functions=functions, dims=(0, 0), seed=0).run()
    assert findings.traits.refusal is None
    assert findings.traits.loss is LossKind.GATHER


def test_a_per_sample_length_leaves_the_plain_mean() -> None:
    def loss(out: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return (out.square().sum(1) / lengths.sum(1)).mean()

    model = Around(lambda linear, x: linear(x))
    functions = Functions(forward=lambda m, b: m(b[0]), loss=lambda out, b: loss(out, b[1]), own_loss=False)
    batch = (_x(), torch.ones(6, 2))
    assert Probe(model, batch, functions=functions, dims=(0, 0), seed=0).run().traits.loss is LossKind.MEAN


def test_a_mean_over_a_mask_inside_the_model_is_weighted() -> None:
    def body(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return linear(x).square().mean(-1)[x[:, 0] > -9].mean()

    findings = _probe(Around(body), lambda out, *_: out, _x())
    assert findings.traits.loss is LossKind.WEIGHTED
    assert findings.rule.in_model


def test_draws_inside_the_loss_belong_to_the_samples() -> None:
    def loss(out: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return (out + torch.randn_like(out)).square().mean()

    findings = _probe(Around(lambda linear, x: linear(x)), loss, _x())
    assert findings.traits.refusal is None
    assert findings.traits.draws


def test_torch_normal_is_answered_from_the_stream() -> None:
    def body(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return linear(x + torch.normal(0.0, 1.0, (len(x), 1)) + torch.normal(x, torch.ones_like(x)))

    findings = _probe(Around(body), _square, _x())
    assert findings.traits.refusal is None
    assert findings.traits.draws


def test_a_generator_of_the_models_own_is_refused() -> None:
    generator, numbers = torch.Generator().manual_seed(1), np.random.default_rng(1)

    def from_torch(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return linear(x + torch.randn(x.shape, generator=generator))

    def from_numpy(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return linear(x + torch.from_numpy(numbers.standard_normal(x.shape)).float())

    for body in (from_torch, from_numpy):
        assert "two runs of the same samples" in _reason(_probe(Around(body), _square, _x()))


def test_numpy_numbers_drawn_for_samples_are_refused_by_name() -> None:
    def body(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return linear(x + torch.from_numpy(np.random.randn(*x.shape)).float())

    assert "numpy" in _reason(_probe(Around(body), _square, _x()))


def _clipped(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    hidden = linear(x)
    hidden.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return hidden


def _reversed(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    hidden = linear(x)
    hidden.register_hook(lambda grad: -grad)
    return hidden


def test_a_hook_that_clips_is_refused_and_one_that_scales_is_not() -> None:
    assert "hook" in _reason(_probe(Around(_clipped), _square, _x()))
    assert _probe(Around(_reversed), _square, _x()).traits.refusal is None


def test_a_backward_with_jumps_is_not_taken_for_rounding() -> None:
    class Sign(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.round()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0].sign()

    def body(linear: nn.Linear, x: torch.Tensor) -> Any:
        return Sign.apply(linear(x))  # type: ignore[no-untyped-call]

    assert "autograd function" in _reason(_probe(Around(body), _square, _x()))


def test_checkpointing_of_the_models_own() -> None:
    from torch.utils.checkpoint import checkpoint

    def plain(linear: nn.Linear, x: torch.Tensor) -> Any:
        return checkpoint(lambda y: torch.tanh(linear(y)), x.requires_grad_(), use_reentrant=True)

    def dropping(linear: nn.Linear, x: torch.Tensor) -> Any:
        return checkpoint(lambda y: F.dropout(torch.tanh(linear(y)), 0.5), x, use_reentrant=False)

    assert _probe(Around(plain), _square, _x()).traits.refusal is None
    assert "run again in backward" in _reason(_probe(Around(dropping), _square, _x()))


def test_an_attribute_that_is_only_kept_does_no_harm() -> None:
    class Keeps(nn.Module):
        def __init__(self, reads: bool) -> None:
            super().__init__()
            self.linear, self.reads = nn.Linear(4, 3), reads
            self.last = torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x) + (self.last if self.reads else 0.0)
            self.last = out.detach().mean()
            return out

    assert _probe(Keeps(False), _square, _x()).traits.refusal is None
    assert "last" in _reason(_probe(Keeps(True), _square, _x()))


def test_a_loss_over_the_whole_batch_may_read_parameters() -> None:
    model = Around(lambda linear, x: linear(x))

    def loss(out: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return torch.logsumexp(out @ out.t(), 1).mean() + sum(p.square().sum() for p in model.parameters())

    findings = _probe(model, loss, _x())
    assert findings.traits.refusal is None
    assert findings.traits.loss is LossKind.GATHER


def test_a_batch_that_cannot_be_cut_is_refused_with_what_happened() -> None:
    def body(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return linear(x).view(6, -1)

    findings = _probe(Around(body), _square, _x())
    assert _reason(findings) == "the model cannot be run on a part of the batch"


def test_a_model_that_rejects_its_example_is_a_user_error() -> None:
    with pytest.raises(TargetError, match="cannot be run on the example"):
        _probe(nn.Linear(5, 3), _square, _x())


def test_empty_and_complex_parameters_are_compared() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.empty(0))
            self.wave = nn.Parameter(torch.randn(3, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = torch.fft.irfft(torch.fft.rfft(x) * self.wave, n=4) + self.empty.sum()
            return made

    assert _probe(Odd(), _square, _x()).traits.refusal is None


def test_a_buffer_that_forward_assigns_anew_is_followed() -> None:
    class Highest(nn.Module):
        highest: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)
            self.register_buffer("highest", torch.full((3,), -9.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.linear(x)
            self.highest = torch.maximum(self.highest, out.detach().amax(0))
            return out

    assert _probe(Highest(), _square, _x()).traits.buffers == {"highest": BufferRule.MAX}


def test_modules_that_cannot_be_watched_are_told_before() -> None:
    with pytest.raises(TargetError, match="lazy"):
        check_module(nn.LazyLinear(3))
    hooked = nn.Linear(2, 2)
    hooked.weight.register_post_accumulate_grad_hook(lambda p: None)  # type: ignore[no-untyped-call]
    with pytest.raises(RefusedError, match="accumulated"):
        check_module(hooked)
