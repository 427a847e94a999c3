"""Profiles of published transformer shapes, made arithmetically."""

from __future__ import annotations

from dataclasses import dataclass

from apportion.records import Component, Method, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A decoder-only transformer. `gated` has three matrices in the MLP (Llama), else two (GPT, MPT)."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    tokens: int
    gated: bool = False
    tied: bool = True


def transformer_profile(shape: Shape, *, samples: int = 1) -> Profile:
    """Return the profile of a fp32 model with fused attention and no dropout, per `samples` sequences.

    Units as in the record. Per token: a matrix of P weights costs 2 P forward FLOPs and 4 P backward;
    attention costs 4 * tokens * hidden forward (not halved for causality) and 2.5 times that backward.
    """
    tree = [_component("", "Model", 0)]
    tree += [_embedding(shape, samples)]
    for layer in range(shape.layers):
        tree += _block(shape, samples, layer)
    tree += [_norm(shape, samples, "norm", 1, block=True), _head(shape, samples)]
    loss = 3 * samples * shape.tokens * shape.vocab * 4
    root = _sum(tree[1:], "", "Model", depth=0, only_depth=1)
    if shape.tied:
        table = shape.vocab * shape.hidden
        root = _less(root, table)
    return Profile(
        name=shape.name,
        components=(root, *tree[1:]),
        batch_samples=samples,
        tokens_per_sample=shape.tokens,
        batch_bytes=8 * samples * shape.tokens,
        loss_bytes=loss,
        matmul_fraction=1.0,
        method=Method.FAKE,
        shared_parameters=(("wte.weight", "head.weight"),) if shape.tied else (),
        largest_tensor_bytes=samples * shape.tokens * shape.vocab * 4,
    )


_FLOWS = (
    "forward_flops",
    "backward_flops",
    "saved_activation_bytes",
    "input_bytes",
    "output_bytes",
    "memory_traffic_bytes",
)
_COUNTS = ("parameters", "buffer_bytes", *_FLOWS)


def _component(fqn: str, kind: str, depth: int, **values: object) -> Component:
    base: dict[str, object] = dict.fromkeys(_COUNTS, 0)
    base |= {"calls": 1, "fingerprint": kind, "dtypes": {"float32": 0}}
    base |= values
    parameters = base["parameters"]
    assert isinstance(parameters, int)
    base |= {
        "parameter_bytes": 4 * parameters,
        "trainable_parameters": parameters,
        "trainable_bytes": 4 * parameters,
    }
    return Component(fqn=fqn, kind=kind, depth=depth, **base)  # type: ignore[arg-type]


def _sum(tree: list[Component], fqn: str, kind: str, *, depth: int, only_depth: int, **own: int) -> Component:
    direct = [c for c in tree if c.depth == only_depth]
    names = ("parameters", "forward_flops", "backward_flops", "saved_activation_bytes", "memory_traffic_bytes")
    values: dict[str, object] = {
        name: sum(getattr(c, name) for c in direct) + own.get(name, 0) for name in names
    }
    values["input_bytes"] = own.get("input_bytes", 0)
    values["output_bytes"] = own.get("output_bytes", 0)
    return _component(fqn, kind, depth, block=bool(fqn) and depth == 1, **values)


def _less(root: Component, parameters: int) -> Component:
    values = {name: getattr(root, name) for name in _FLOWS}
    return _component("", root.kind, 0, parameters=root.parameters - parameters, **values)


def _embedding(shape: Shape, samples: int) -> Component:
    out = samples * shape.tokens * shape.hidden * 4
    return _component(
        "wte",
        "Embedding",
        1,
        parameters=shape.vocab * shape.hidden,
        block=True,
        output_bytes=out,
        input_bytes=8 * samples * shape.tokens,
        memory_traffic_bytes=2 * out,
    )


def _linear(shape: Shape, samples: int, fqn: str, depth: int, inputs: int, outputs: int) -> Component:
    tokens = samples * shape.tokens
    flops = 2 * tokens * inputs * outputs
    return _component(
        fqn,
        "Linear",
        depth,
        parameters=inputs * outputs,
        forward_flops=flops,
        backward_flops=2 * flops,
        saved_activation_bytes=4 * tokens * inputs,
        input_bytes=4 * tokens * inputs,
        output_bytes=4 * tokens * outputs,
        memory_traffic_bytes=4 * (tokens * (inputs + outputs) + inputs * outputs),
    )


def _norm(shape: Shape, samples: int, fqn: str, depth: int, *, block: bool = False) -> Component:
    size = 4 * samples * shape.tokens * shape.hidden
    return _component(
        fqn,
        "Norm",
        depth,
        parameters=shape.hidden,
        block=block,
        saved_activation_bytes=size,
        input_bytes=size,
        output_bytes=size,
        memory_traffic_bytes=2 * size,
    )


def _block(shape: Shape, samples: int, layer: int) -> list[Component]:
    name, hidden = f"h.{layer}", shape.hidden
    size = 4 * samples * shape.tokens * hidden
    kv = hidden * shape.kv_heads // shape.heads
    scores = 4 * samples * shape.tokens * shape.tokens * hidden
    qkv = [_linear(shape, samples, f"{name}.attn.qkv", 3, hidden, hidden + 2 * kv)]
    out = [_linear(shape, samples, f"{name}.attn.out", 3, hidden, hidden)]
    qkv_bytes = size + 2 * size * kv // hidden
    attention = _sum(
        qkv + out,
        f"{name}.attn",
        "Attention",
        depth=2,
        only_depth=3,
        forward_flops=scores,
        backward_flops=scores * 5 // 2,
        saved_activation_bytes=qkv_bytes,
        memory_traffic_bytes=qkv_bytes + size,
        input_bytes=size,
        output_bytes=size,
    )
    wide = 4 * samples * shape.tokens * shape.ffn
    ups = ["gate", "up"] if shape.gated else ["up"]
    mlp = [_linear(shape, samples, f"{name}.mlp.{up}", 3, hidden, shape.ffn) for up in ups]
    mlp += [_linear(shape, samples, f"{name}.mlp.down", 3, shape.ffn, hidden)]
    steps = 2 * len(ups) - 1
    feed = _sum(
        mlp,
        f"{name}.mlp",
        "MLP",
        depth=2,
        only_depth=3,
        saved_activation_bytes=wide * steps,
        memory_traffic_bytes=wide * (2 * steps + (1 if shape.gated else 0)),
        input_bytes=size,
        output_bytes=size,
    )
    norms = [_norm(shape, samples, f"{name}.{part}", 2) for part in ("norm1", "norm2")]
    below = [norms[0], attention, *qkv, *out, norms[1], feed, *mlp]
    head = _sum(
        below,
        name,
        "Block",
        depth=1,
        only_depth=2,
        memory_traffic_bytes=2 * 3 * size,
        input_bytes=size,
        output_bytes=size,
    )
    return [head, *below]


def _head(shape: Shape, samples: int) -> Component:
    head = _linear(shape, samples, "head", 1, shape.hidden, shape.vocab)
    values = {name: getattr(head, name) for name in ("parameters", *_FLOWS)}
    return _component("head", "Linear", 1, block=True, **values)
