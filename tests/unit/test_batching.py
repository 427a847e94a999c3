"""One batch over many parts: trees, slices, draws, statistics, rows, buffers."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from apportion.batching import (
    DelayedExchange,
    DrawLog,
    DrawScope,
    DrawStream,
    GlobalStatistics,
    LocalExchange,
    Part,
    RecordingExchange,
    ReplayError,
    ReplayExchange,
    find_dims,
    find_rows,
    find_rule,
    find_sites,
    flatten,
    hidden_tensors,
    map_tensors,
    slice_batch,
    spread_samples,
    tensors,
)
from apportion.batching.draws import _splitmix
from apportion.errors import RefusedError, TargetError
from apportion.records import BufferRule

Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass(frozen=True)
class Out:
    main: torch.Tensor
    more: dict[str, Any]
    tag: str = "ok"


class Opaque:
    def __init__(self) -> None:
        self.held = torch.ones(2)


def test_trees_keep_every_class() -> None:
    value = Out(torch.ones(2), {"x": [torch.zeros(1), None], "p": Pair(1, torch.ones(3))}, tag="t")
    doubled = map_tensors(lambda t: t * 2, value)
    assert type(doubled) is Out
    assert doubled.tag == "t"
    assert isinstance(doubled.more["p"], Pair)
    assert doubled.more["x"][1] is None
    assert torch.equal(doubled.more["p"].b, torch.full((3,), 2.0))
    ordered = map_tensors(lambda t: t, OrderedDict(b=torch.ones(1), a=2))
    assert type(ordered) is OrderedDict
    assert list(ordered) == ["b", "a"]


def test_hidden_tensors_are_named() -> None:
    assert hidden_tensors({"a": Opaque(), "b": torch.ones(1)}) == ["Opaque"]
    assert hidden_tensors({"a": "text", "b": torch.ones(1)}) == []


def test_find_dims() -> None:
    assert find_dims((torch.ones(4, 3), torch.ones(4), "x", torch.tensor(1.0))) == (0, 0, None, None)
    assert find_dims((torch.ones(6, 8, 5), torch.ones(2, 8, 7), torch.ones(8))) == (1, 1, 0)
    with pytest.raises(TargetError, match="which dimension"):
        find_dims((torch.ones(3, 4), torch.ones(4, 3)))
    with pytest.raises(TargetError, match="no tensor"):
        find_dims(("a", 1))


def test_slices_put_together_are_the_batch() -> None:
    batch = {"x": torch.arange(12).view(2, 6), "y": torch.arange(6), "k": 3}
    dims = (1, 0, None)
    pieces = [slice_batch(batch, dims, a, b) for a, b in ((0, 4), (4, 6))]
    assert torch.equal(torch.cat([p["x"] for p in pieces], 1), batch["x"])
    assert pieces[1]["k"] == 3
    assert tensors(spread_samples(batch, dims, 3))[1].tolist() == [0, 2, 5]


# ---- draws


class Drawing(nn.Module):
    """Draws of every supported kind, with the batch in dimension 0, in dimension 1, or nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.4)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.rnn = nn.GRU(8, 8, num_layers=2, dropout=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(x) + torch.randn_like(x) + torch.rand(x.shape)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = self.rnn(h.transpose(0, 1))[0].transpose(0, 1)
        if torch.rand([]) < 2.0:
            h = F.alpha_dropout(h, 0.2, training=True) + x.new_empty(x.shape).bernoulli_(0.3)
        noise = torch.empty_like(h).exponential_() + torch.empty_like(h).uniform_(-1, 1).normal_(0.0, 2.0)
        return h + noise + torch.randint(0, 5, (x.size(0), 1, 1)) + torch.randperm(3)[0]


def _run_drawing(
    model: Drawing, x: torch.Tensor, part: Part, sites: dict[Any, Any], log: DrawLog | None = None
) -> Any:
    scope = DrawScope(model, [name for name, _ in model.named_modules()])
    stream = DrawStream(seed=3, step=5, part=part, sites=sites, log=log)
    with scope.drawing_from(stream):
        out = model(x)
    scope.remove()
    return out


def test_parts_draw_what_the_whole_batch_draws() -> None:
    torch.manual_seed(0)
    model, x = Drawing(), torch.randn(5, 4, 8)
    logs = [DrawLog(), DrawLog()]
    whole_part = Part(start=0, stop=5, total=5)
    _run_drawing(model, x, whole_part, {}, logs[0])
    _run_drawing(model, x[:4], Part(start=0, stop=4, total=5), {}, logs[1])
    sites = {(site.module, site.index): site.dim for site in find_sites(*logs)}
    assert sites["drop", 0] == 0
    assert sites["rnn", 0] == 1
    before = torch.get_rng_state()
    whole = _run_drawing(model, x, whole_part, sites)
    parts = [_run_drawing(model, x[a:b], Part(start=a, stop=b, total=5), sites) for a, b in ((0, 2), (2, 5))]
    assert torch.equal(torch.get_rng_state(), before)
    torch.testing.assert_close(torch.cat(parts), whole)
    assert not torch.allclose(_run_drawing(model, x[:2], Part(start=2, stop=4, total=5), sites), whole[:2])


def test_draws_have_the_right_distribution() -> None:
    part = Part(start=0, stop=200, total=200)
    model = nn.Identity()
    with DrawScope(model, []).drawing_from(DrawStream(seed=0, step=0, part=part, sites={})):
        kept = F.dropout(torch.ones(200, 100), 0.5) > 0
        normal = torch.randn(200, 500)
        chosen = torch.multinomial(torch.tensor([0.1, 0.9]).expand(200, 2), 1)
        whole = torch.randint(2, 7, (200, 50))
    assert abs(kept.float().mean() - 0.5) < 0.02
    assert abs(normal.mean()) < 0.02
    assert abs(normal.std() - 1) < 0.02
    assert abs(chosen.float().mean() - 0.9) < 0.08
    assert set(whole.flatten().tolist()) == {2, 3, 4, 5, 6}


def test_the_stream_of_other_devices_is_uniform_and_sliceable() -> None:
    cpu = torch.device("cpu")
    whole = _splitmix(123456789, 0, 40, 500, cpu)
    assert torch.equal(whole[10:30], _splitmix(123456789, 10, 20, 500, cpu))
    assert abs(float(whole.mean()) - 0.5) < 0.01
    counts = torch.histc(whole, 10, 0, 1) / whole.numel()
    assert float((counts - 0.1).abs().max()) < 0.01
    assert not torch.equal(whole, _splitmix(123456790, 0, 40, 500, cpu))


def test_an_unknown_random_operation_is_refused_by_name() -> None:
    part = Part(start=0, stop=2, total=2)
    scope = DrawScope(nn.Identity(), [])
    stream = DrawStream(seed=0, step=0, part=part, sites={})
    with scope.drawing_from(stream), pytest.raises(RefusedError, match="poisson"):
        torch.poisson(torch.ones(2))


# ---- statistics


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(8, 3), (8, 3, 5), (8, 3, 4, 4)])
def test_batch_norm_over_parts_is_that_of_the_batch(affine: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    x, upstream = torch.randn(shape, dtype=torch.float64) * 2 + 3, torch.randn(shape, dtype=torch.float64)
    plain, parted = kind(3, affine=affine).double(), kind(3, affine=affine).double()
    leaf = x.clone().requires_grad_()
    (plain(leaf) * upstream).sum().backward()
    recording = RecordingExchange()
    recorded = x.clone().requires_grad_()
    with GlobalStatistics(Part(start=0, stop=8, total=8), recording, weighted=False):
        out = kind(3, affine=affine).double()(recorded)
    (out * upstream).sum().backward()
    grads = []
    for a, b in ((0, 3), (3, 8)):
        replay = ReplayExchange(recording.values)
        part = x[a:b].clone().requires_grad_()
        with GlobalStatistics(Part(start=a, stop=b, total=8), replay, weighted=False):
            out = parted(part)
        (out * upstream[a:b]).sum().backward()
        grads.append(part.grad)
        if a == 0:
            parted.reset_running_stats()
    torch.testing.assert_close(torch.cat(grads), leaf.grad)
    torch.testing.assert_close(parted.running_mean, plain.running_mean)
    torch.testing.assert_close(parted.running_var, plain.running_var)
    if affine:
        torch.testing.assert_close(parted.weight.grad, plain.weight.grad)


def _masked_mean(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    mask = target >= 0
    return (out.square().sum(-1) * mask).sum() / mask.sum().clamp(min=1)


LOSSES = {
    "cross-entropy": lambda out, t: F.cross_entropy(out, t, ignore_index=-1),
    "class weights": lambda out, t: F.cross_entropy(
        out, t.clamp(min=0), weight=torch.linspace(0.1, 2, 6, dtype=out.dtype), label_smoothing=0.1
    ),
    "nll": lambda out, t: nn.NLLLoss(ignore_index=-1)(out.log_softmax(-1), t),
    "masked mean": _masked_mean,
    "selected mean": lambda out, t: out[t >= 0].square().mean(),
    "count by item": lambda out, t: (out.sum(-1) * (t >= 0)).sum() / (t >= 0).sum().item(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_weighted_losses_add_up(name: str) -> None:
    torch.manual_seed(0)
    out, target = torch.randn(9, 6, dtype=torch.float64), torch.tensor([0, -1, -1, -1, 4, 5, 1, 2, -1])
    loss = LOSSES[name]
    leaf = out.clone().requires_grad_()
    expected = loss(leaf, target)
    expected.backward()
    recording = RecordingExchange()
    with GlobalStatistics(Part(start=0, stop=9, total=9), recording, weighted=True):
        loss(out.clone().requires_grad_(), target)
    value, grads = 0.0, []
    for a, b in ((0, 4), (4, 9)):
        part = Part(start=a, stop=b, total=9)
        piece = out[a:b].clone().requires_grad_()
        with GlobalStatistics(part, ReplayExchange(recording.values), weighted=True):
            share = loss(piece, target[a:b]) * part.weight
        share.backward()
        value += float(share.detach())
        grads.append(piece.grad)
    assert value == pytest.approx(float(expected.detach()), rel=1e-12)
    torch.testing.assert_close(torch.cat(grads), leaf.grad)


def test_plain_averaging_of_these_losses_is_wrong() -> None:
    out, target = torch.randn(8, 6), torch.tensor([0, -1, -1, -1, 4, 5, 1, 2])
    loss = LOSSES["cross-entropy"]
    averaged = (loss(out[:4], target[:4]) + loss(out[4:], target[4:])) / 2
    assert abs(averaged - loss(out, target)) > 1e-3


def test_replay_refuses_other_control_flow() -> None:
    replay = ReplayExchange([torch.ones(2)])
    with pytest.raises(ReplayError):
        replay.sum(torch.ones(3))


def test_a_delayed_count_is_corrected() -> None:
    delayed = DelayedExchange(LocalExchange(), 3)
    answers = [float(delayed.sum(torch.tensor(n, dtype=torch.float64))) for n in (4.0, 1.0, 7.0)]
    assert answers == [12.0, 12.0, 12.0]
    assert delayed.correction() == pytest.approx(12.0 / 12.0)
    uneven = DelayedExchange(LocalExchange(), 2)
    for n in (1.0, 5.0):
        uneven.sum(torch.tensor(n, dtype=torch.float64))
    assert uneven.correction() == pytest.approx(2.0 / 6.0)


# ---- rows and buffers


def test_find_rows() -> None:
    longer = {"a": torch.ones(4, 3), "b": torch.ones(2, 8, 5), "c": torch.ones(())}
    shorter = {"a": torch.ones(3, 3), "b": torch.ones(2, 6, 5), "c": torch.ones(())}
    rows = find_rows(longer, shorter, 4, 3)
    assert rows is not None
    assert [(row.dim, row.per_sample) for row in rows] == [(0, 1), (1, 2), (None, 1)]
    assert find_rows((torch.ones(7),), (torch.ones(5),), 4, 3) is None
    assert len(flatten(longer)[0]) == 3


@pytest.mark.parametrize(
    ("rule", "whole", "parts"),
    [
        (BufferRule.SAME, 3.0, (3.0, 3.0)),
        (BufferRule.MEAN, 2.75, (2.0, 3.0)),
        (BufferRule.SUM, 6.0, (2.0, 5.0)),
        (BufferRule.MAX, 9.0, (9.0, 2.0)),
        (BufferRule.MIN, -9.0, (2.0, -9.0)),
        (None, 77.0, (2.0, 3.0)),
    ],
)
def test_rules_of_buffers(rule: BufferRule | None, whole: float, parts: tuple[float, float]) -> None:
    tensors_ = [torch.tensor([p]) for p in parts]
    assert find_rule(torch.tensor([1.0]), torch.tensor([whole]), tensors_, [0.25, 0.75], 1e-6) is rule
