"""What each strategy keeps on a rank and what it sends: one table, one row per strategy.

Note [semantics]
ddp     gradients live in DDP's buckets (gradient_as_bucket_view), reduced in the last micro-batch's backward
zero1   ddp, optimizer state split by whole parameters; owners broadcast the new values, flattened
zero2   fully_shard(reshard_after_forward=False): gathered in forward, kept through backward
fsdp    fully_shard(reshard_after_forward=True) over blocks; the rest stays gathered during the step
hsdp    fsdp over dp_shard, gradients of each shard all-reduced over dp_replicate
dp      one process: weights broadcast and gradients reduced each step, the loss on the first device
naive   blocks on several devices of one process, each with its inputs and outputs carried to and fro
Sharded strategies gather and reduce in every micro-batch; weights travel in their own type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..records import Cluster, Device, DeviceType, Strategy
from .collective import (
    Group,
    all_gather_seconds,
    all_reduce_seconds,
    broadcast_seconds,
    point_to_point_seconds,
    reduce_scatter_seconds,
)
from .compute import BlockSeconds, memory_rate
from .layout import Layout
from .memory import Footprint
from .optimizer import OPERATOR_SECONDS, find_optimizer
from .workload import BlockLoad, Workload

BUCKET_BYTES = 25 * 2**20
"""DDP's bucket_cap_mb, default 25."""
UNIT_CALL_SECONDS = 1.1e-3
"""Host time of fully_shard around one collective of one unit on CPU; GPUs run behind it. A rough figure: 16
units of two nn.Linear(32, 32), two gloo ranks, torch 2.13, took 3.8 ms (two collectives) and 6.5 ms (three)
per unit and step on a machine so busy that plain layers took 1.75 times as long; that is divided out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """What the communication of a layout depends on. `units` are the distinct blocks and the rest of the
    model, last, each with its seconds of one micro-batch."""

    workload: Workload
    layout: Layout
    cluster: Cluster
    device: Device
    units: tuple[tuple[BlockLoad, BlockSeconds], ...]

    @property
    def overlaps(self) -> bool:
        """Whether collectives run beside the work: on GPUs; CPU ranks need their cores for both."""
        return self.device.type is DeviceType.CUDA


@dataclass(frozen=True, slots=True, kw_only=True)
class Exposed:
    """Seconds per step that the ranks wait for data-parallel and for device-to-device traffic."""

    data: float = 0.0
    placement: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyCost:
    """`footprint` prices memory, `exposed` communication; `optimizer_share` is the part of the trainable
    bytes that the fullest rank updates; `zero_stage` what the plan calls it."""

    footprint: Callable[[Workload, Layout], Footprint]
    exposed: Callable[[Priced], Exposed]
    optimizer_share: Callable[[Workload, Layout], float]
    zero_stage: int = 0


def group_of(cluster: Cluster, size: int, *, across: bool = False) -> Group:
    """Return the group of `size` ranks packed into nodes, or with one rank in each node (`across`)."""
    per_node = 1 if across else min(size, min(node.devices_per_node for node in cluster.nodes))
    while size % per_node:
        per_node -= 1
    return Group(
        num_nodes=size // per_node,
        ranks_per_node=per_node,
        intra_node=cluster.intra_node,
        inter_node=cluster.inter_node if cluster.num_nodes > 1 else cluster.intra_node,
    )


def _state(workload: Workload, layout: Layout, share: float) -> float:
    return find_optimizer(layout.optimizer).state * workload.trainable_bytes * share


def _accumulated(workload: Workload, layout: Layout) -> float:
    return float(workload.trainable_bytes) if layout.grad_accumulation > 1 else 0.0


def _whole(workload: Workload, layout: Layout) -> float:
    return 1.0


def _largest_owner(workload: Workload, layout: Layout) -> float:
    """Parameters are not cut: the fullest owner holds its part or the largest one."""
    if not workload.trainable_bytes:
        return 0.0
    largest = workload.largest_parameter_bytes / workload.trainable_bytes
    return min(1.0, max(1 / layout.mesh.num_data_ranks, largest))


def _shard(workload: Workload, layout: Layout) -> float:
    return 1 / layout.mesh.dp_shard


def _single_footprint(workload: Workload, layout: Layout) -> Footprint:
    return Footprint(
        parameters=workload.parameter_bytes + workload.buffer_bytes,
        gradients_before=_accumulated(workload, layout),
        gradients_after=workload.trainable_bytes,
        optimizer=_state(workload, layout, 1.0),
    )


def _ddp_footprint(workload: Workload, layout: Layout) -> Footprint:
    return Footprint(
        parameters=workload.parameter_bytes + workload.buffer_bytes,
        gradients_before=workload.trainable_bytes,
        gradients_after=workload.trainable_bytes,
        optimizer=_state(workload, layout, 1.0),
    )


def _zero1_footprint(workload: Workload, layout: Layout) -> Footprint:
    share = _largest_owner(workload, layout)
    return Footprint(
        parameters=workload.parameter_bytes + workload.buffer_bytes,
        gradients_before=workload.trainable_bytes,
        gradients_after=workload.trainable_bytes,
        optimizer=_state(workload, layout, share),
        sent=workload.trainable_bytes,
    )


def _sharded(workload: Workload, layout: Layout, gathered: float) -> Footprint:
    """`gathered` are the unsharded parameters; one block's gradient and its reduction's input come on top,
    the rest's gradient stays whole until the end of backward."""
    share = _shard(workload, layout)
    block = max((block.trainable_bytes for block in workload.blocks), default=0)
    return Footprint(
        parameters=workload.parameter_bytes * share + workload.buffer_bytes,
        gradients_before=_accumulated(workload, layout) * share,
        gradients_after=workload.trainable_bytes * share,
        optimizer=_state(workload, layout, share),
        gathered=gathered + 2.0 * block + workload.rest.trainable_bytes,
    )


def _zero2_footprint(workload: Workload, layout: Layout) -> Footprint:
    return _sharded(workload, layout, workload.parameter_bytes)


def _fsdp_footprint(workload: Workload, layout: Layout) -> Footprint:
    """The present block, the prefetched one, and the gather's output that the latter is copied from."""
    largest = max((block.parameter_bytes for block in workload.blocks), default=0)
    return _sharded(workload, layout, workload.rest.parameter_bytes + 3.0 * largest)


def _dp_footprint(workload: Workload, layout: Layout) -> Footprint:
    return Footprint(
        parameters=workload.parameter_bytes + workload.buffer_bytes,
        gradients_before=_accumulated(workload, layout),
        gradients_after=workload.trainable_bytes,
        optimizer=_state(workload, layout, 1.0),
        gathered=workload.trainable_bytes,
        loss_samples=layout.micro_batch_size * layout.num_devices,
    )


def _naive_footprint(workload: Workload, layout: Layout) -> Footprint:
    """The first device: its share of the blocks, all that is in none, and the loss."""
    share = naive_share(workload, layout.num_devices)
    return Footprint(
        parameters=workload.parameter_bytes * share + workload.buffer_bytes,
        gradients_before=_accumulated(workload, layout) * share,
        gradients_after=workload.trainable_bytes * share,
        optimizer=_state(workload, layout, share),
        own_share=share,
    )


def naive_share(workload: Workload, num_devices: int) -> float:
    """Return the part of the model on the fullest device: blocks are not cut, the rest is on the first."""
    total = workload.parameter_bytes or 1
    even = sum(block.parameter_bytes * block.count for block in workload.blocks) / num_devices
    largest = max((block.parameter_bytes for block in workload.blocks), default=total)
    return min(1.0, (workload.rest.parameter_bytes + max(even, largest)) / total)


def _nothing(priced: Priced) -> Exposed:
    return Exposed()


def _ddp_exposed(priced: Priced) -> Exposed:
    """Buckets are reduced during the last micro-batch's backward; nothing hides the last bucket."""
    size = priced.layout.mesh.num_data_ranks
    group = group_of(priced.cluster, size)
    payload = priced.workload.trainable_bytes
    buckets = max(1, -(-payload // BUCKET_BYTES))
    total = buckets * all_reduce_seconds(payload / buckets, group)
    if not priced.overlaps:
        return Exposed(data=total)
    tail = all_reduce_seconds(min(payload, BUCKET_BYTES), group)
    backward = sum((seconds.backward + seconds.recompute) * block.count for block, seconds in priced.units)
    return Exposed(data=max(tail, total - backward))


def _zero1_exposed(priced: Priced) -> Exposed:
    """As ddp, then every owner broadcasts its flattened part; both ends copy it.

    Flattening and giving back takes five small operators per tensor (detach, reshape, split, view, copy).
    """
    size = priced.layout.mesh.num_data_ranks
    payload = priced.workload.trainable_bytes
    sent = size * broadcast_seconds(payload / size, group_of(priced.cluster, size)) if size > 1 else 0.0
    copies = 4 * payload / memory_rate(priced.device)
    calls = 5 * priced.workload.num_tensors * OPERATOR_SECONDS
    return Exposed(data=_ddp_exposed(priced).data + sent + copies + calls)


def _sharded_exposed(priced: Priced, *, gathers: int) -> Exposed:
    """Return what prefetching does not hide of `gathers` all-gathers and one reduction per unit.

    A unit's gather runs beside the previous unit's work, its reduction beside the following one's; both
    share the links, so a unit hides at most its own seconds of them. The first gather and the last
    reduction have nothing to hide behind. Without overlap (CPU) everything counts, with the copies into and
    out of the flat buffers.
    """
    layout = priced.layout
    shard = group_of(priced.cluster, layout.mesh.dp_shard)
    replicate = group_of(priced.cluster, layout.mesh.dp_replicate, across=priced.cluster.num_nodes > 1)
    forward = backward = 0.0
    first_gather = last_reduce = 0.0
    for block, seconds in priced.units:
        gather, reduce = _unit_seconds(priced, block, shard, replicate)
        again = gather if gathers > 1 and block is not priced.workload.rest else 0.0
        if priced.overlaps:
            forward += max(0.0, gather - seconds.forward) * block.count
            backward += max(0.0, again + reduce - seconds.backward - seconds.recompute) * block.count
            first_gather, last_reduce = max(first_gather, gather), max(last_reduce, reduce)
        else:
            forward += gather * block.count
            backward += (again + reduce) * block.count
    per_pass = max(forward, first_gather) + max(backward, last_reduce)
    return Exposed(data=per_pass * layout.grad_accumulation)


def _unit_seconds(priced: Priced, block: BlockLoad, shard: Group, replicate: Group) -> tuple[float, float]:
    gather = all_gather_seconds(block.parameter_bytes, shard) if block.parameter_bytes else 0.0
    reduce = 0.0
    if block.trainable_bytes:
        reduce = reduce_scatter_seconds(block.trainable_bytes, shard)
        reduce += all_reduce_seconds(block.trainable_bytes / shard.size, replicate)
    if not priced.overlaps:
        copied = 2 / memory_rate(priced.device)
        gather += block.parameter_bytes * copied + (UNIT_CALL_SECONDS if gather else 0.0)
        reduce += block.trainable_bytes * copied + (UNIT_CALL_SECONDS if reduce else 0.0)
    return gather, reduce


def _gathered_once(priced: Priced) -> Exposed:
    return _sharded_exposed(priced, gathers=1)


def _gathered_twice(priced: Priced) -> Exposed:
    return _sharded_exposed(priced, gathers=2)


def _dp_exposed(priced: Priced) -> Exposed:
    group = group_of(priced.cluster, priced.layout.num_devices)
    workload = priced.workload
    send = broadcast_seconds(workload.parameter_bytes, group)
    reduce = broadcast_seconds(workload.trainable_bytes, group)
    return Exposed(data=(send + reduce) * priced.layout.grad_accumulation)


def _naive_exposed(priced: Priced) -> Exposed:
    """Inputs and outputs of the blocks that are not on the first device cross twice, forward and backward."""
    devices, samples = priced.layout.num_devices, priced.layout.micro_batch_size
    away = (devices - 1) / devices
    crossing = sum(
        block.count
        * point_to_point_seconds((block.input_bytes + block.output_bytes) * samples, priced.cluster.intra_node)
        for block in priced.workload.blocks
    )
    return Exposed(placement=2 * away * crossing * priced.layout.grad_accumulation)


STRATEGIES: Mapping[Strategy, StrategyCost] = {
    Strategy.SINGLE: StrategyCost(footprint=_single_footprint, exposed=_nothing, optimizer_share=_whole),
    Strategy.DP: StrategyCost(footprint=_dp_footprint, exposed=_dp_exposed, optimizer_share=_whole),
    Strategy.DDP: StrategyCost(footprint=_ddp_footprint, exposed=_ddp_exposed, optimizer_share=_whole),
    Strategy.ZERO1: StrategyCost(
        footprint=_zero1_footprint, exposed=_zero1_exposed, optimizer_share=_largest_owner, zero_stage=1
    ),
    Strategy.ZERO2: StrategyCost(
        footprint=_zero2_footprint, exposed=_gathered_once, optimizer_share=_shard, zero_stage=2
    ),
    Strategy.FSDP: StrategyCost(
        footprint=_fsdp_footprint, exposed=_gathered_twice, optimizer_share=_shard, zero_stage=3
    ),
    Strategy.HSDP: StrategyCost(
        footprint=_fsdp_footprint, exposed=_gathered_twice, optimizer_share=_shard, zero_stage=3
    ),
    Strategy.NAIVE: StrategyCost(footprint=_naive_footprint, exposed=_naive_exposed, optimizer_share=_whole),
}
"""The strategies that have a price. A new one adds a row here and one in planning.candidates."""
