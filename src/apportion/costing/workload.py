"""A profile per sample and per block, ready to be priced many times.

Note [units of sharding]
A block shards, gathers and is checkpointed on its own. Tensors with several names (tied weights) and
parameters outside every block belong to the rest, which is gathered whole while a step runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..records import Component, Profile

_MATMUL_FLOPS_PER_BYTE = 2.0
"""Modules whose own operators do more than this hold matmul-like results (element-wise ones do under one)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLoad:
    """One of `count` equal blocks. Units: parameters are elements and bytes of one block; everything else is
    per sample.

    `weight_traffic_bytes` is read once per forward whatever the batch; `kept_bytes` are the matmul and
    attention results that selective checkpointing keeps.
    """

    count: int = 1
    parameters: int = 0
    parameter_bytes: int = 0
    trainable_bytes: int = 0
    weight_traffic_bytes: float = 0.0
    forward_flops: float = 0.0
    backward_flops: float = 0.0
    traffic_bytes: float = 0.0
    saved_bytes: float = 0.0
    kept_bytes: float = 0.0
    input_bytes: float = 0.0
    output_bytes: float = 0.0
    calls: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The distinct blocks, the rest of the model, and totals. Units as in BlockLoad.

    `fqns` names the blocks in the order of the model.
    """

    fqns: tuple[str, ...]
    blocks: tuple[BlockLoad, ...]
    rest: BlockLoad
    parameters: int
    parameter_bytes: int
    trainable_bytes: int
    buffer_bytes: int
    forward_flops: float
    backward_flops: float
    saved_bytes: float
    loss_bytes: float
    batch_bytes: float
    tokens_per_sample: int
    largest_parameter_bytes: int
    num_tensors: int

    @property
    def half(self) -> bool:
        """Whether the parameters themselves are 16-bit, so that nothing is cast."""
        return self.parameters > 0 and self.parameter_bytes < 3 * self.parameters


def summarize(profile: Profile) -> Workload:
    """Return the profile per sample."""
    root = profile.root
    samples = profile.batch_samples
    subtrees = [_subtree(profile.components, index) for index, c in enumerate(profile.components) if c.block]
    tied = _tied_modules(profile)
    blocks = _counted([_block(tree, samples, tied) for tree in subtrees])
    leaves = [tree for tree in _own(profile.components) if tree.own_trainable_bytes]
    return Workload(
        fqns=tuple(tree[0].fqn for tree in subtrees),
        blocks=blocks,
        rest=_rest(profile, blocks),
        parameters=root.parameters,
        parameter_bytes=root.parameter_bytes,
        trainable_bytes=root.trainable_bytes,
        buffer_bytes=root.buffer_bytes,
        forward_flops=root.forward_flops / samples,
        backward_flops=root.backward_flops / samples,
        saved_bytes=root.saved_activation_bytes / samples,
        loss_bytes=profile.loss_bytes / samples,
        batch_bytes=profile.batch_bytes / samples,
        tokens_per_sample=profile.tokens_per_sample,
        largest_parameter_bytes=max((leaf.own_trainable_bytes for leaf in leaves), default=0),
        num_tensors=2 * len(leaves),
    )


def _counted(blocks: Sequence[BlockLoad]) -> tuple[BlockLoad, ...]:
    """Return each distinct block once, with its count."""
    return tuple(replace(block, count=count) for block, count in Counter(blocks).items())


@dataclass(frozen=True, slots=True)
class _Own:
    """What a module does itself, its children left out."""

    component: Component
    own_flops: int
    own_traffic_bytes: int
    own_parameter_bytes: int
    own_trainable_bytes: int


def _subtree(components: Sequence[Component], index: int) -> Sequence[Component]:
    """Return a component and those below it; `components` is in pre-order."""
    depth = components[index].depth
    end = index + 1
    while end < len(components) and components[end].depth > depth:
        end += 1
    return components[index:end]


def _own(tree: Sequence[Component]) -> list[_Own]:
    """Return every module of a pre-order tree without its children."""
    sums: list[list[int]] = [
        [c.forward_flops, c.memory_traffic_bytes, c.parameter_bytes, c.trainable_bytes] for c in tree
    ]
    path: list[int] = []
    for index, component in enumerate(tree):
        while path and tree[path[-1]].depth >= component.depth:
            path.pop()
        if path:
            parent = sums[path[-1]]
            parent[0] -= component.forward_flops
            parent[1] -= component.memory_traffic_bytes
            parent[2] -= component.parameter_bytes
            parent[3] -= component.trainable_bytes
        path.append(index)
    return [_Own(c, *(max(0, value) for value in own)) for c, own in zip(tree, sums, strict=True)]


def _tied_modules(profile: Profile) -> frozenset[str]:
    names = (name for group in profile.shared_parameters for name in group)
    return frozenset(name.rpartition(".")[0] for name in names)


def _block(tree: Sequence[Component], samples: int, tied: frozenset[str]) -> BlockLoad:
    head = tree[0]
    owns = _own(tree)
    elsewhere = [own for own in owns if own.component.fqn in tied]
    weights = sum(min(own.own_parameter_bytes, own.own_traffic_bytes) for own in owns)
    kept = sum(
        own.component.output_bytes
        for own in owns
        if own.own_flops > _MATMUL_FLOPS_PER_BYTE * own.own_traffic_bytes
    )
    return BlockLoad(
        parameters=head.parameters,
        parameter_bytes=head.parameter_bytes - sum(own.own_parameter_bytes for own in elsewhere),
        trainable_bytes=head.trainable_bytes - sum(own.own_trainable_bytes for own in elsewhere),
        weight_traffic_bytes=weights,
        forward_flops=head.forward_flops / samples,
        backward_flops=head.backward_flops / samples,
        traffic_bytes=(head.memory_traffic_bytes - weights) / samples,
        saved_bytes=head.saved_activation_bytes / samples,
        kept_bytes=min(kept, head.saved_activation_bytes) / samples,
        input_bytes=head.input_bytes / samples,
        output_bytes=head.output_bytes / samples,
        calls=sum(component.calls for component in tree),
    )


def _rest(profile: Profile, blocks: tuple[BlockLoad, ...]) -> BlockLoad:
    """Return what lies outside the blocks; the loss is booked there."""
    root, samples = profile.root, profile.batch_samples
    weights = sum(block.weight_traffic_bytes * block.count for block in blocks)

    def left(total: float, name: str) -> float:
        return max(0.0, total - sum(float(getattr(block, name)) * block.count for block in blocks))

    return BlockLoad(
        parameters=int(left(root.parameters, "parameters")),
        parameter_bytes=int(left(root.parameter_bytes, "parameter_bytes")),
        trainable_bytes=int(left(root.trainable_bytes, "trainable_bytes")),
        forward_flops=left(root.forward_flops / samples, "forward_flops"),
        backward_flops=left(root.backward_flops / samples, "backward_flops"),
        traffic_bytes=left((root.memory_traffic_bytes - weights) / samples, "traffic_bytes"),
        saved_bytes=left(root.saved_activation_bytes / samples, "saved_bytes"),
        calls=int(left(sum(c.calls for c in profile.components), "calls")),
    )
