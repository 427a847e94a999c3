"""The smallest change that makes something fit, found by searching, mildest first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..describing.catalogue import kinds
from ..errors import ApportionError
from ..records import Candidate, Checkpointing, Cluster, DeviceType, Limits, Precision, Strategy
from ..units import format_bytes
from .situation import Situation, consider

MAX_DEVICES = 16384
Best = Callable[[Situation], Candidate | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What to do in the user's words, and the situation it leads to."""

    words: str
    limits: Limits
    cluster: Cluster


def find_change(situation: Situation, leanest: Candidate | None, best: Best) -> str:
    """Return how many bytes the leanest layout lacks and the mildest changes that fit, or that none does.

    Tried in turn: what the user fixed (micro-batch, checkpointing, strategy, memory limit), 16-bit
    arithmetic, a smaller batch, more devices of the kind, a larger device.
    """
    if leanest is None:
        return ""
    short = leanest.estimate.memory_bytes.peak - situation.usable_bytes
    head = f"{format_bytes(short)} ({short} bytes) short on each device with {leanest.name}, the leanest layout"
    fitting: list[str] = []
    for change in _changes(situation):
        found = _try(situation, change, best)
        if found is not None:
            fitting.append(f"{change.words} ({found.name}, {format_bytes(found.estimate.memory_bytes.peak)})")
        if len(fitting) == 2:
            break
    if not fitting:
        return f"{head}; no batch, precision, checkpointing, number or kind of devices makes it fit"
    return f"{head}; would fit with {' or with '.join(fitting)}"


def _try(situation: Situation, change: Change, best: Best) -> Candidate | None:
    try:
        other = consider(situation.profile, change.cluster, change.limits, workload=situation.workload)
        return best(other)
    except ApportionError:
        # A change that is itself refused (a batch smaller than the ranks) does not help.
        return None


def _changes(situation: Situation) -> Iterator[Change]:
    limits, cluster = situation.limits, situation.cluster
    for words, changed in _relaxed(situation):
        yield Change(words=words, limits=changed, cluster=cluster)
    if situation.precision is Precision.FP32 and "bf16" in situation.device.peak_flops_per_second:
        yield Change(
            words="--precision bf16", limits=replace(limits, precision=Precision.BF16), cluster=cluster
        )
    yield from _smaller_batches(situation)
    yield from _more_devices(situation)
    yield from _larger_devices(situation)


def _relaxed(situation: Situation) -> Iterator[tuple[str, Limits]]:
    limits = situation.limits
    local = -(-limits.batch_size // situation.num_devices)
    if limits.micro_batch_size is not None and not situation.profile.batch_norms:
        micro = min(limits.micro_batch_size, local) // 2
        while micro:
            yield f"--micro-batch-size {micro}", replace(limits, micro_batch_size=micro)
            micro //= 2
    if limits.activation_checkpointing not in (None, Checkpointing.FULL):
        yield (
            "--activation-checkpointing full",
            replace(limits, activation_checkpointing=Checkpointing.FULL),
        )
    if limits.strategy is not None or limits.zero_stage is not None or limits.mesh:
        wanted = Strategy.SINGLE if situation.num_devices == 1 else Strategy.FSDP
        if limits.strategy is not wanted:
            yield (
                f"--strategy {wanted.value}",
                replace(limits, strategy=wanted, zero_stage=None, mesh={}),
            )
    if limits.memory_bytes is not None and limits.memory_bytes < situation.device.memory_bytes:
        yield "no --memory-limit", replace(limits, memory_bytes=None)


def _smaller_batches(situation: Situation) -> Iterator[Change]:
    """Halve the batch down to one sample per rank; with free micro-batches only its own bytes shrink."""
    batch, least = situation.limits.batch_size, situation.num_devices
    while batch > least:
        batch = max(least, batch // 2)
        micro = situation.limits.micro_batch_size
        local = -(-batch // situation.num_devices)
        limits = replace(
            situation.limits, batch_size=batch, micro_batch_size=None if micro is None else min(micro, local)
        )
        yield Change(words=f"--batch-size {batch}", limits=limits, cluster=situation.cluster)


def _more_devices(situation: Situation) -> Iterator[Change]:
    """Double the nodes; machines of one node are filled to eight devices first."""
    if situation.on_cpu:
        return
    cluster, limits = situation.cluster, replace(situation.limits, mesh={}, strategy=None, zero_stage=None)
    node = cluster.nodes[0]
    per_node, count = node.devices_per_node, cluster.num_nodes
    while per_node * count < min(MAX_DEVICES, limits.batch_size):
        if count == 1 and per_node < 8:
            per_node = min(8, per_node * 2)
        else:
            count *= 2
        nodes = (replace(node, devices_per_node=per_node, count=count),)
        words = f"{count}x{per_node}x{node.device.kind}" if count > 1 else f"{per_node}x{node.device.kind}"
        yield Change(
            words=f"--devices {words}",
            limits=limits,
            cluster=replace(cluster, nodes=nodes, dollars_per_hour=None),
        )


def _larger_devices(situation: Situation) -> Iterator[Change]:
    """As many devices of the next larger kinds of the catalogue, the least memory first."""
    if situation.device.type is not DeviceType.CUDA:
        return
    node, count = situation.cluster.nodes[0], situation.cluster.num_nodes
    limits = replace(situation.limits, memory_bytes=None)
    larger = (kind for kind in kinds().values() if kind.device.memory_bytes > situation.device.memory_bytes)
    for kind in sorted(larger, key=lambda kind: kind.device.memory_bytes):
        cluster = replace(
            situation.cluster,
            nodes=(replace(node, device=kind.device, count=count),),
            intra_node=kind.intra_node,
            inter_node=kind.inter_node(node.devices_per_node),
            dollars_per_hour=None,
        )
        many = f"{count}x" if count > 1 else ""
        words = f"--devices {many}{node.devices_per_node}x{kind.name}"
        yield Change(words=words, limits=limits, cluster=cluster)
