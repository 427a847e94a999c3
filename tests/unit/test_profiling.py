"""Profiles on meta tensors against real runs, counted by torch itself."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from apportion.errors import TargetError
from apportion.profiling import profile_module, profile_parts
from apportion.reading.parts import JobParts
from apportion.records import DeviceType, Method, Profile, from_json_text, to_json_text

VOCABULARY, WIDTH, TOKENS, SAMPLES = 61, 32, 12, 4


class Block(nn.Module):
    def __init__(self, *, attention: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)
        self.fused = attention

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.mix(self.norm(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = (q @ k.transpose(-1, -2) / 8).softmax(-1) @ v
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(b, t, d)))
        return x + self.down(F.gelu(self.up(x)))


class Gpt(nn.Module):
    def __init__(self, layers: int = 5, **options: Any) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.an = nn.BatchNorm2d(width)
        self.b = nn.Conv2d(width, width, 3, padding=1, groups=2, bias=False)
        self.bn = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn(self.b(F.relu(self.an(self.a(x))))))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.first = nn.Sequential(*(Residual(8) for _ in range(4)))
        self.wider = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.second = nn.Sequential(*(Residual(16) for _ in range(2)))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.wider(self.first(self.stem(x)))).mean((2, 3)))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.words(ids))[0])


def call(module: nn.Module, batch: Any) -> Any:
    return module(batch)


def next_token(output: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), ids.flatten())


def mean_square(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (SAMPLES, TOKENS))


def images() -> Tensor:
    return torch.randn(SAMPLES, 3, 16, 16)


def profile(module: nn.Module, batch: Any, loss: Any = mean_square, **options: Any) -> Profile:
    options = {"forward": call, "device_type": DeviceType.CPU} | options
    return profile_module(module, batch, loss=loss, batch_samples=SAMPLES, name="test", **options)


def really(module: nn.Module, batch: Any, loss: Any) -> tuple[int, int, int]:
    """Return forward FLOPs, backward FLOPs and bytes kept by autograd for the forward of a real run."""
    skip = {id(t.untyped_storage()): t.untyped_storage() for t in module.state_dict(keep_vars=True).values()}
    skip[id(batch.untyped_storage())] = batch.untyped_storage()
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in skip:
            kept[id(storage)] = storage
        return tensor

    with FlopCounterMode(display=False) as counter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = module(batch)
        forward = counter.get_total_flops()
        loss(output, batch).backward()
    return forward, counter.get_total_flops() - forward, sum(s.nbytes() for s in kept.values())


@pytest.mark.parametrize(
    ("build", "batch", "loss"),
    [
        (lambda: Gpt(attention=False), tokens, next_token),
        (lambda: Gpt(attention=False, dropout=0.1), tokens, next_token),
        (ResNet, images, mean_square),
    ],
    ids=["gpt", "gpt-dropout", "resnet"],
)
def test_costs_equal_those_of_a_real_run(
    build: Callable[[], nn.Module], batch: Callable[[], Any], loss: Any
) -> None:
    module, data = build(), batch()
    found = profile(module, data, loss)
    forward, backward, kept = really(module, data, loss)
    assert found.method is Method.FAKE
    assert found.notes == ()
    assert found.root.forward_flops == forward
    if not isinstance(module, ResNet):  # torch's counter takes a grouped convolution's backward for a full one
        assert found.root.backward_flops == backward
    assert found.root.saved_activation_bytes == kept


def test_fused_attention_keeps_what_a_real_run_keeps_and_counts_its_products() -> None:
    module, data = Gpt(), tokens()
    found = profile(module, data, next_token)
    forward, backward, kept = really(module, data, next_token)
    attention = 5 * 2 * SAMPLES * TOKENS * TOKENS * WIDTH * 2
    assert found.root.saved_activation_bytes == kept
    assert found.root.forward_flops == forward + attention
    assert found.root.backward_flops == backward + 2 * attention


def test_lstm_counts_every_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    module, data = Lstm(), tokens()
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    forward, backward, kept = really(module, data, next_token)
    found = profile(module, data, next_token)
    gates = 2 * SAMPLES * TOKENS * (WIDTH + WIDTH) * 4 * WIDTH * 2
    head = 2 * SAMPLES * TOKENS * WIDTH * VOCABULARY
    assert found.root.forward_flops == gates + head == forward
    assert found.root.backward_flops == backward
    assert found.root.saved_activation_bytes == pytest.approx(kept, rel=0.02)


def test_grouped_convolutions_backward_is_twice_the_forward() -> None:
    found = profile(nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8)), images())
    last = next(c for c in found.components if c.fqn == "1")
    assert last.forward_flops == 2 * SAMPLES * 14 * 14 * 8 * 9
    assert last.backward_flops == 2 * last.forward_flops


def test_copied_blocks_have_the_numbers_of_run_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    module, data = Gpt(layers=6, dropout=0.1), tokens()
    ran: list[int] = []
    original = Block.forward

    def counted(self: Block, x: Tensor) -> Tensor:
        ran.append(1)
        return original(self, x)

    monkeypatch.setattr(Block, "forward", counted)
    copied = profile(module, data, next_token)
    assert len(ran) == 2
    monkeypatch.setattr("apportion.profiling.repeats.RUNS", 100)
    whole = profile(module, data, next_token)
    assert len(ran) == 2 + 6
    assert copied == whole
    assert [c.repeats for c in copied.components if c.kind == "Block"] == ["", *["blocks.0"] * 5]


def test_a_block_that_differs_is_run() -> None:
    module = Gpt(layers=4)
    module.blocks[3].up, module.blocks[3].down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    found = {c.fqn: c for c in profile(module, tokens(), next_token).components}
    assert found["blocks.3"].repeats == ""
    assert found["blocks.2"].repeats == "blocks.0"
    assert found["blocks.3"].forward_flops < found["blocks.2"].forward_flops


class Auxiliary(nn.Module):
    """Blocks that leave something on themselves for the root to read."""

    class Item(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            self.extra = self.lin(x)
            return x + self.extra

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ModuleList(self.Item() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for item in self.items:
            x = item(x)
        return x + sum(item.extra for item in self.items)


def test_blocks_that_write_to_themselves_are_all_run() -> None:
    module = Auxiliary()
    found = profile(module, torch.randn(SAMPLES, WIDTH))
    assert found.method is Method.FAKE
    assert found.root.forward_flops == 5 * 2 * SAMPLES * WIDTH * WIDTH
    assert not hasattr(module.items[0], "extra")


def test_blocks_called_twice_are_counted_twice() -> None:
    class Twice(Gpt):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.words(ids)
            for block in (*self.blocks, *self.blocks):
                x = block(x)
            return self.head(self.norm(x))

    once, twice = (profile(kind(), tokens(), next_token) for kind in (Gpt, Twice))
    first, second = (sum(b.forward_flops for b in p.blocks if b.kind == "Block") for p in (once, twice))
    assert second == 2 * first
    assert {b.calls for b in twice.blocks if b.kind == "Block"} == {2}


def test_checkpointed_blocks_keep_only_their_inputs() -> None:
    class Saving(Gpt):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.words(ids)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(self.norm(x))

    plain, saving = (profile(kind(), tokens(), next_token) for kind in (Gpt, Saving))
    assert saving.root.saved_activation_bytes < plain.root.saved_activation_bytes / 3
    assert saving.root.forward_flops == plain.root.forward_flops


def test_sums_and_partitions_hold() -> None:
    found = profile(Gpt(), tokens(), next_token)
    by_name = {c.fqn: c for c in found.components}
    assert next(iter(by_name)) == ""
    assert sum(b.parameters for b in found.blocks) == found.root.parameters
    assert found.root.parameters == sum(p.numel() for p in Gpt().parameters())
    assert [b.fqn for b in found.blocks] == [
        "words",
        "places",
        *(f"blocks.{i}" for i in range(5)),
        "norm",
        "head",
    ]
    for field in ("forward_flops", "backward_flops", "saved_activation_bytes", "memory_traffic_bytes"):
        children = [c for c in found.components if c.depth == 1]
        assert sum(getattr(c, field) for c in children) <= getattr(found.root, field)
    assert by_name["blocks.1"].output_bytes == SAMPLES * TOKENS * WIDTH * 4
    assert by_name["head"].parameters == 0
    assert found.shared_parameters == (("words.weight", "head.weight"),)
    assert found.root.dtypes == {"float32": found.root.parameters}
    assert found.batch_bytes == SAMPLES * TOKENS * 8
    assert 0.8 < found.matmul_fraction < 1


def test_loss_bytes_are_logits_their_copy_and_their_gradients() -> None:
    logits = SAMPLES * TOKENS * VOCABULARY * 4
    found = profile(Gpt(), tokens(), next_token)
    assert 4 * logits <= found.loss_bytes < 4.1 * logits

    class Inside(Gpt):
        def forward(self, ids: Tensor) -> Any:
            logits = super().forward(ids)
            return {"loss": next_token(logits, ids), "logits": logits}

    inside = profile(Inside(), tokens(), None)
    assert inside.loss_bytes == found.loss_bytes
    assert inside.root.saved_activation_bytes == found.root.saved_activation_bytes
    outside = profile(Inside(), tokens(), lambda output, batch: output["loss"])
    assert outside == inside


class Odd(nn.Module):
    """Parameters of every kind that plans must know."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, WIDTH, sparse=True)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.idle = nn.Linear(WIDTH, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: Tensor) -> Tensor:
        self.seen += ids.numel()
        return self.scale * self.frozen(self.norm(self.words(ids)))


def test_odd_parameters_are_named() -> None:
    found = profile(Odd(), torch.randint(0, 9, (SAMPLES,)))
    assert found.method is Method.FAKE
    assert found.sparse_parameters == ("words.weight",)
    assert found.batch_norms == ("norm",)
    assert found.scalar_parameters == ("scale",)
    assert found.unused_parameters == ("idle.weight", "idle.bias")
    assert found.root.trainable_parameters == found.root.parameters - WIDTH * (WIDTH + 1)
    assert found.root.buffer_bytes == 2 * WIDTH * 4 + 8 + 8


def test_unused_parameters_of_copied_blocks() -> None:
    class Item(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    found = profile(nn.Sequential(*(Item() for _ in range(4))), torch.randn(SAMPLES, 4))
    assert found.unused_parameters == tuple(f"{i}.idle.{n}" for i in range(4) for n in ("weight", "bias"))


def snapshot(module: nn.Module) -> list[Any]:
    state = [(name, tensor.clone()) for name, tensor in module.state_dict().items()]
    attributes = [
        sorted((k, id(v), len(v) if isinstance(v, dict | list) else 0) for k, v in vars(m).items())
        for m in module.modules()
    ]
    return [state, attributes, torch.get_rng_state(), random.getstate()]


def same(first: list[Any], second: list[Any]) -> bool:
    tensors = zip(first[0], second[0], strict=True)
    return (
        all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in tensors)
        and first[1] == second[1]
        and torch.equal(first[2], second[2])
        and first[3] == second[3]
    )


class Rude(Odd):
    """Draws random numbers, changes itself, and looks at values when asked."""

    def __init__(self, *, looks: bool, fails: bool) -> None:
        super().__init__()
        self.log: list[int] = []
        self.looks, self.fails = looks, fails

    def forward(self, ids: Tensor) -> Tensor:
        self.log.append(1)
        self.last = random.random()
        output = F.dropout(super().forward(ids), 0.5)
        if self.looks and output.detach().abs().sum().item() < 0:
            return output[:0]
        if self.fails:
            raise ValueError("no way")
        return output


@pytest.mark.parametrize("looks", [False, True])
def test_the_module_is_left_as_it_was(looks: bool) -> None:
    module = Rude(looks=looks, fails=False)
    module.words.sparse = False
    ids = torch.randint(0, 9, (SAMPLES,))
    before = snapshot(module)
    found = profile(module, ids)
    assert found.method is (Method.MEASURED if looks else Method.FAKE)
    assert same(before, snapshot(module))
    assert all(p.grad is None for p in module.parameters())
    module.log.append(2)
    assert not same(before, snapshot(module))


def test_a_module_that_cannot_run_is_a_target_error_and_is_left_as_it_was() -> None:
    module = Rude(looks=False, fails=True)
    ids = torch.randint(0, 9, (SAMPLES,))
    before = snapshot(module)
    with pytest.raises(TargetError, match="no way") as raised:
        profile(module, ids)
    assert isinstance(raised.value.__cause__, ValueError)
    assert same(before, snapshot(module))


def test_a_real_run_says_why_and_counts_the_same() -> None:
    class Looks(Gpt):
        def forward(self, ids: Tensor) -> Tensor:
            output = super().forward(ids)
            return output if output.detach().isnan().sum().item() == 0 else output[:0]

    class Item(Gpt):
        def forward(self, ids: Tensor) -> Tensor:
            output = super().forward(ids)
            float(output.detach().sum())
            return output

    fake = profile(Gpt(attention=False), tokens(), next_token)
    real = profile(Item(attention=False), tokens(), next_token)
    assert real.method is Method.MEASURED
    assert "item()" in real.notes[0]
    for field in ("forward_flops", "backward_flops", "saved_activation_bytes", "output_bytes"):
        assert getattr(real.root, field) == getattr(fake.root, field)
    assert profile(Looks(), tokens(), next_token).method is Method.FAKE


def test_a_forward_that_looks_at_whole_numbers_stays_fake() -> None:
    class Looks(Gpt):
        def forward(self, ids: Tensor) -> Tensor:
            mask = torch.ones(ids.shape, device=self.head.weight.device)
            if not mask.to(torch.bool).all() or int(ids.max()) >= VOCABULARY:
                raise ValueError("bad ids")
            return super().forward(ids)

    found = profile(Looks(), tokens(), next_token)
    assert found.method is Method.FAKE
    assert found.root.forward_flops == profile(Gpt(), tokens(), next_token).root.forward_flops


@pytest.mark.parametrize("loss", [lambda output, batch: output, lambda output, batch: None])
def test_a_loss_that_is_no_scalar_is_refused(loss: Any) -> None:
    with pytest.raises(TargetError, match="not a scalar"):
        profile(Gpt(), tokens(), loss)


def test_a_total_with_its_count_is_a_loss() -> None:
    found = profile(Gpt(), tokens(), lambda output, ids: (next_token(output, ids), ids.numel()))
    assert found.root.backward_flops == 2 * found.root.forward_flops


def test_a_lazy_module_is_refused() -> None:
    with pytest.raises(TargetError, match="no shape"):
        profile(nn.Sequential(nn.LazyLinear(3)), torch.randn(SAMPLES, 4))


def test_a_frozen_model_has_no_backward() -> None:
    found = profile(Gpt().requires_grad_(False), tokens(), next_token)
    assert found.root.backward_flops == 0
    assert "no backward" in found.notes[0]


def test_a_device_decides_what_dropout_and_attention_keep() -> None:
    module = Gpt(dropout=0.1)
    cpu, gpu = (profile(module, tokens(), next_token, device_type=t) for t in DeviceType)
    masks = 5 * SAMPLES * TOKENS * WIDTH
    assert cpu.root.saved_activation_bytes - gpu.root.saved_activation_bytes == masks * (4 - 1)


def test_a_profile_travels_as_json() -> None:
    found = profile(Gpt(), tokens(), next_token)
    assert from_json_text(Profile, to_json_text(found)) == found


def parts(model: Callable[[], nn.Module], **options: Any) -> JobParts:
    given: dict[str, Any] = {
        "name": "job",
        "target": "job.py",
        "model": model,
        "example": lambda n: torch.randint(0, VOCABULARY, (n, TOKENS)),
        "forward": call,
        "loss": next_token,
        "tokens_per_sample": TOKENS,
    }
    return JobParts(**(given | options))


def test_parts_are_profiled_without_weights() -> None:
    built: list[nn.Module] = []

    def model() -> nn.Module:
        built.append(Gpt())
        return built[-1]

    found = profile_parts(parts(model), batch_samples=SAMPLES, device_type=DeviceType.CPU)
    assert all(p.is_meta for p in built[0].parameters())
    assert len(built) == 1
    direct = profile(Gpt(), tokens(), next_token, tokens_per_sample=TOKENS)
    assert found.components == direct.components
    assert (found.batch_samples, found.tokens_per_sample) == (SAMPLES, TOKENS)


def test_parts_that_must_run_are_run_small_and_scaled() -> None:
    class Item(Gpt):
        def forward(self, ids: Tensor) -> Tensor:
            sizes.append(ids.shape[0])
            output = super().forward(ids)
            float(output.detach().sum())
            return output

    sizes: list[int] = []
    found = profile_parts(parts(lambda: Item(attention=False)), batch_samples=64, device_type=DeviceType.CPU)
    fake = profile_parts(parts(lambda: Gpt(attention=False)), batch_samples=64, device_type=DeviceType.CPU)
    assert sizes[-1] == 2
    assert found.method is Method.MEASURED
    assert found.batch_samples == 64
    assert found.root.parameters == fake.root.parameters
    assert found.root.forward_flops == fake.root.forward_flops
    assert found.batch_bytes == fake.batch_bytes
    # The mask of positions and the like do not grow with the batch.
    assert found.root.saved_activation_bytes == pytest.approx(fake.root.saved_activation_bytes, rel=0.02)


def test_a_model_that_looks_at_values_while_built_is_built_anyway() -> None:
    def model() -> nn.Module:
        rates = [rate.item() for rate in torch.linspace(0, 0.5, 5)]
        return Gpt(layers=len(rates))

    found = profile_parts(parts(model), batch_samples=SAMPLES)
    assert found.method is Method.FAKE
    assert sum(b.kind == "Block" for b in found.blocks) == 5


def test_parts_too_large_to_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Item(Gpt):
        def forward(self, ids: Tensor) -> Tensor:
            output = super().forward(ids)
            float(output.detach().sum())
            return output

    monkeypatch.setattr("apportion.profiling.costs.MEMORY_SHARE", 0.0)
    with pytest.raises(TargetError, match="too large"):
        profile_parts(parts(Item), batch_samples=SAMPLES)


def test_profiling_does_not_import_the_compiler() -> None:
    code = """
import sys, torch
sys.path.insert(0, 'tests/unit')
import test_profiling as t
p = t.profile_parts(t.parts(lambda: t.Gpt(dropout=0.1)), batch_samples=4)
assert p.method.value == 'fake', p.notes
print([name for name in ('torch._dynamo', 'sympy') if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
