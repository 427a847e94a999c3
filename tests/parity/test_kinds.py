"""Kinds of modules that are easy to get wrong, over ranks, against a plain loop over batches that vary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

from apportion import parallelize
from apportion.errors import RefusedError
from apportion.records import Candidate, Estimate, Memory, Mesh, Seconds, Stage, Strategy
from apportion.running.gradients import named
from ranks import RankPool

pytestmark = pytest.mark.slow
STRATEGIES = (Strategy.DDP, Strategy.ZERO1, Strategy.ZERO2, Strategy.FSDP)
Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Kind:
    """A model, its loss, and the masks of its three batches (ones where the model takes none)."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module], Loss]
    forward: Callable[[nn.Module, Any], Any] = lambda model, batch: model(batch[0])
    refused: str = ""


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def _masked(count: Callable[[torch.Tensor], Any]) -> Callable[[nn.Module], Loss]:
    def make(_: nn.Module) -> Loss:
        return lambda out, batch: (out.square().sum(-1) * batch[1]).sum() / count(batch[1])

    return make


def _contrast(model: nn.Module) -> Loss:
    """A loss over pairs that reads a weight itself."""

    def contrast(out: torch.Tensor, batch: Any) -> torch.Tensor:
        weight = model.get_parameter("2.weight")
        return torch.logsumexp(out @ out.t(), 1).mean() + 0.1 * weight.square().sum()

    return contrast


def _plain(_: nn.Module) -> Loss:
    return lambda out, batch: out.square().mean()


def _own(_: nn.Module) -> Loss:
    return lambda out, batch: out


def _dice(_: nn.Module) -> Loss:
    def dice(out: torch.Tensor, batch: Any) -> torch.Tensor:
        p = torch.sigmoid(out)
        target = batch[1][:, None].expand_as(p)
        return 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)

    return dice


def _mean_over_mask(model: nn.Module, batch: Any) -> torch.Tensor:
    taken: torch.Tensor = model(batch[0]).square().sum(-1)[batch[1] > 0].mean()
    return taken


class Recomputing(nn.Module):
    def __init__(self, *, reentrant: bool, drop: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 3)
        self.reentrant, self.drop = reentrant, drop

    def forward(self, x: torch.Tensor) -> Any:
        def block(y: torch.Tensor) -> torch.Tensor:
            return F.dropout(torch.tanh(self.second(y)), self.drop)

        return checkpoint(block, self.first(x), use_reentrant=self.reentrant)


class Observer(nn.Module):
    """Running extremes and counts, some assigned anew, and activations kept for a look at them."""

    highest: torch.Tensor
    mean: torch.Tensor
    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("highest", torch.full((3,), -9.0))
        self.register_buffer("mean", torch.zeros(3), persistent=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.last = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.linear(x)
        with torch.no_grad():
            self.highest = torch.maximum(self.highest, out.amax(0))
            self.mean = self.mean * 0.9 + out.mean(0) * 0.1
            self.seen += len(x)
        self.last = out
        return out


class Odd(nn.Module):
    """Empty, 0-dim and complex parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.empty, self.scale = nn.Parameter(torch.empty(0)), nn.Parameter(torch.tensor(0.5))
        self.wave = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wave: torch.Tensor = torch.fft.irfft(torch.fft.rfft(self.linear(x)) * self.wave, n=4)
        return wave * self.scale + self.empty.sum()


class Hooked(nn.Module):
    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.change = nn.Linear(4, 4), nn.Linear(4, 3), change

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        hidden.register_hook(self.change)
        return self.second(hidden)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(4, 3), torch.Generator().manual_seed(5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x + torch.randn(x.shape, generator=self.generator))


KINDS = {
    "count_nonzero": Kind(_net, _masked(torch.count_nonzero)),
    "sum over dims": Kind(_net, _masked(lambda mask: mask.sum(dim=(0,)))),
    "count as a float": Kind(_net, _masked(lambda mask: float(mask.sum()))),
    "mean over a mask in the model": Kind(_net, _own, forward=_mean_over_mask),
    "pairs and a weight in the loss": Kind(_net, _contrast),
    "dice": Kind(_net, _dice),
    "reentrant checkpoint": Kind(lambda: Recomputing(reentrant=True), _plain),
    "checkpointed dropout": Kind(
        lambda: Recomputing(reentrant=False, drop=0.5), _plain, refused="run again in backward"
    ),
    "observers": Kind(Observer, _plain),
    "odd parameters": Kind(Odd, _plain),
    "hook that scales": Kind(lambda: Hooked(torch.neg), _plain),
    "hook that clips": Kind(lambda: Hooked(lambda g: g.clamp(-0.01, 0.01)), _plain, refused="hook"),
    "own generator": Kind(Noisy, _plain, refused="two runs of the same samples"),
}


def _batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    masks = ([1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0, 1])
    return [(torch.randn(7, 4, generator=generator), torch.tensor(mask).float()) for mask in masks]


def _seeded(kind: Kind) -> nn.Module:
    torch.manual_seed(0)
    return kind.model()


def _candidate(strategy: Strategy, model: nn.Module, world_size: int) -> Candidate:
    sharded = strategy in (Strategy.ZERO2, Strategy.FSDP)
    return Candidate(
        name=strategy.value,
        strategy=strategy,
        mesh=Mesh(dp_shard=world_size) if sharded else Mesh(dp_replicate=world_size),
        micro_batch_size=-(-7 // world_size),
        grad_accumulation=1,
        estimate=Estimate(
            step_seconds=0,
            samples_per_second=0,
            tokens_per_second=0,
            tflops_per_device=0,
            mfu=0,
            seconds=Seconds(),
            memory_bytes=Memory(),
        ),
        stages=(Stage(stage=0, components=tuple(n for n, _ in model.named_children()), parameters=0),),
    )


def _plain_loop(kind: Kind) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = _seeded(kind)
    loss, optimizer, losses = kind.loss(model), SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for batch in _batches():
        optimizer.zero_grad()
        value = loss(kind.forward(model, batch), batch)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses, dict([*model.named_parameters(), *model.named_buffers()])


def _run(rank: int, name: str, strategy: Strategy, world_size: int) -> str:
    """Return why the kind was refused, or '' after its steps were found equal to the plain loop's."""
    kind = KINDS[name]
    model = _seeded(kind)
    try:
        session = parallelize(
            model,
            SGD(model.parameters(), lr=0.05, momentum=0.9),
            loss=kind.loss(model),
            example=_batches()[0],
            plan=_candidate(strategy, model, world_size),
            forward=kind.forward,
            batch_dims=(0, 0),
        )
    except RefusedError as error:
        return str(error)
    losses = [session.step(batch).loss for batch in _batches()]
    found = named([*model.named_parameters(), *model.named_buffers()])
    session.close()
    expected, state = _plain_loop(kind)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    for key, value in state.items():
        torch.testing.assert_close(found[key], value.detach(), rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")
    return ""


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.value)
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_kind_is_equal_or_refused_for_the_right_reason(strategy: Strategy, world_size: int) -> None:
    with RankPool(world_size) as pool:
        for name, kind in KINDS.items():
            reason = pool.run(_run, name, strategy, world_size)[0]
            assert bool(reason) == bool(kind.refused), f"{name}: {reason}"
            assert kind.refused in reason, f"{name}: {reason}"
