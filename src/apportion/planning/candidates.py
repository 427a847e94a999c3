"""The layouts of each strategy, or why it has none: one table, one row per strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ..costing import Layout
from ..errors import PlanError
from ..records import Checkpointing, Excluded, Mesh, Strategy
from .situation import INSTEAD, UNAVAILABLE, Situation

Layouts = tuple[Layout, ...]
Generator = Callable[[Situation], Layouts | Excluded]
_MAX_SPLITS = 8
"""Accumulation counts tried one by one; beyond them, powers of two."""


def micro_batches(situation: Situation, local_batch: int) -> tuple[tuple[int, int], ...]:
    """Return (micro-batch, accumulation) pairs for a rank's batch, the fewest passes first.

    Batch-norm allows only one pass. Each count of passes has its smallest micro-batch: a larger one would
    need more memory for the same time.
    """
    if situation.limits.micro_batch_size is not None:
        micro = situation.limits.micro_batch_size
        return ((micro, -(-local_batch // micro)),)
    if situation.profile.batch_norms:
        return ((local_batch, 1),)
    counts = set(range(1, min(_MAX_SPLITS, local_batch) + 1)) | {local_batch}
    micro = 1
    while micro < local_batch:
        counts.add(-(-local_batch // micro))
        micro *= 2
    pairs: dict[int, int] = {}
    for count in sorted(counts):
        size = -(-local_batch // count)
        pairs.setdefault(size, -(-local_batch // size))
    return tuple(pairs.items())


def checkpointings(situation: Situation) -> tuple[Checkpointing, ...]:
    """Return the ways of checkpointing to try; without blocks there is nothing to wrap.

    Raises: PlanError if checkpointing is asked for and there are no blocks.
    """
    fixed = situation.limits.activation_checkpointing
    if situation.workload.blocks:
        return tuple(Checkpointing) if fixed is None else (fixed,)
    if fixed not in (None, Checkpointing.NONE):
        raise PlanError(
            f"there are no blocks to checkpoint in {situation.profile.name}",
            try_="--activation-checkpointing none",
        )
    return (Checkpointing.NONE,)


def _layouts(situation: Situation, strategy: Strategy, mesh: Mesh, num_devices: int) -> Layouts:
    return tuple(_each(situation, strategy, mesh, num_devices))


def _each(situation: Situation, strategy: Strategy, mesh: Mesh, num_devices: int) -> Iterator[Layout]:
    batch = situation.limits.batch_size
    for micro, count in micro_batches(situation, -(-batch // mesh.num_data_ranks)):
        for checkpointing in checkpointings(situation):
            yield Layout(
                strategy=strategy,
                mesh=mesh,
                batch_size=batch,
                micro_batch_size=micro,
                grad_accumulation=count,
                num_devices=num_devices,
                checkpointing=checkpointing,
                precision=situation.precision,
                optimizer=situation.limits.optimizer.lower(),
            )


def _excluded(strategy: Strategy, reason: str, try_: str = "") -> Excluded:
    return Excluded(name=strategy.value, reason=reason, try_=try_)


def _other_mesh(situation: Situation, strategy: Strategy, replicate: int, shard: int) -> Excluded | None:
    """Return the exclusion of a strategy whose mesh is not the one that the user fixed."""
    if not situation.replicate or (situation.replicate, situation.shard) == (replicate, shard):
        return None
    asked = f"{situation.replicate} x {situation.shard}"
    return _excluded(strategy, f"has dp_replicate {replicate} x dp_shard {shard}, asked for is {asked}")


def _single(situation: Situation) -> Layouts | Excluded:
    if situation.num_devices > 1 and not situation.asked(Strategy.SINGLE):
        return _excluded(
            Strategy.SINGLE,
            f"uses one of the {situation.num_devices} devices",
            "--strategy single, or --devices with one",
        )
    return _other_mesh(situation, Strategy.SINGLE, 1, 1) or _layouts(situation, Strategy.SINGLE, Mesh(), 1)


def _needs_several(situation: Situation, strategy: Strategy) -> Excluded | None:
    if situation.num_devices > 1:
        return None
    return _excluded(strategy, "needs at least two devices, there is one", "--strategy single, or more devices")


def _replicated(strategy: Strategy) -> Generator:
    def generate(situation: Situation) -> Layouts | Excluded:
        size = situation.num_devices
        return (
            _needs_several(situation, strategy)
            or _other_mesh(situation, strategy, size, 1)
            or _layouts(situation, strategy, Mesh(dp_replicate=size), size)
        )

    return generate


def _sharded(strategy: Strategy) -> Generator:
    def generate(situation: Situation) -> Layouts | Excluded:
        size = situation.num_devices
        return (
            _needs_several(situation, strategy)
            or _other_mesh(situation, strategy, 1, size)
            or _layouts(situation, strategy, Mesh(dp_shard=size), size)
        )

    return generate


def _hsdp(situation: Situation) -> Layouts | Excluded:
    """Shard within a node and replicate across nodes, or as the mesh says; on one node only when asked."""
    size, cluster = situation.num_devices, situation.cluster
    per_node = {node.devices_per_node for node in cluster.nodes}
    replicate, shard = situation.replicate, situation.shard
    if replicate and (replicate == 1 or shard == 1):
        return _other_mesh(situation, Strategy.HSDP, cluster.num_nodes, max(per_node)) or _excluded(
            Strategy.HSDP, "needs dp_replicate and dp_shard of at least two"
        )
    if not replicate and cluster.num_nodes > 1:
        if len(per_node) > 1 or per_node == {1}:
            why = (
                "nodes of one device leave nothing to shard within"
                if per_node == {1}
                else "nodes differ in size"
            )
            return _excluded(Strategy.HSDP, why, "--strategy fsdp")
        replicate, shard = cluster.num_nodes, per_node.pop()
    elif not replicate:
        if not situation.asked(Strategy.HSDP):
            return _excluded(Strategy.HSDP, "there is one node, in which it is fsdp", "--strategy fsdp")
        if size < 4 or size % 2:
            return _excluded(
                Strategy.HSDP,
                f"needs an even number of at least four devices, there are {size}",
                "--strategy fsdp",
            )
        replicate, shard = 2, size // 2
    return _layouts(situation, Strategy.HSDP, Mesh(dp_replicate=replicate, dp_shard=shard), size)


def _dp(situation: Situation) -> Layouts | Excluded:
    size, strategy = situation.num_devices, Strategy.DP
    if situation.on_cpu:
        return _excluded(strategy, "torch.nn.DataParallel needs GPUs", "--strategy ddp")
    if situation.cluster.num_nodes > 1:
        return _excluded(strategy, "is one process, which reaches the GPUs of one node only", "--strategy ddp")
    if situation.profile.batch_norms:
        return _excluded(
            strategy, "takes batch-norm statistics per device, which changes the answer", "--strategy ddp"
        )
    return (
        _needs_several(situation, strategy)
        or _other_mesh(situation, strategy, size, 1)
        or _layouts(situation, strategy, Mesh(dp_replicate=size), size)
    )


def _naive(situation: Situation) -> Layouts | Excluded:
    """Blocks over the devices of one process. The mesh's pp is the number of devices."""
    size, strategy = situation.num_devices, Strategy.NAIVE
    if situation.on_cpu and not situation.asked(strategy):
        return _excluded(
            strategy, "one process has one CPU, there is nothing to spread over", "--strategy naive"
        )
    if situation.cluster.num_nodes > 1:
        return _excluded(
            strategy, "is one process, which reaches the devices of one node only", "--strategy fsdp"
        )
    movable = sum(block.count for block in situation.workload.blocks if block.parameter_bytes)
    if size > 1 and movable < size:
        return _excluded(strategy, f"has {movable} blocks to place on {size} devices", "--strategy fsdp")
    if situation.limits.mesh.get("pp", size) != size:
        return _excluded(
            strategy, f"pp {situation.limits.mesh['pp']} does not use {size} devices", f"--pp {size}"
        )
    return (
        _needs_several(situation, strategy)
        or _other_mesh(situation, strategy, 1, 1)
        or _layouts(situation, strategy, Mesh(pp=size), size)
    )


def _unavailable(strategy: Strategy) -> Generator:
    def generate(situation: Situation) -> Excluded:
        return _excluded(strategy, UNAVAILABLE[strategy], INSTEAD)

    return generate


GENERATORS: Mapping[Strategy, Generator] = {
    Strategy.SINGLE: _single,
    Strategy.DDP: _replicated(Strategy.DDP),
    Strategy.ZERO1: _replicated(Strategy.ZERO1),
    Strategy.ZERO2: _sharded(Strategy.ZERO2),
    Strategy.FSDP: _sharded(Strategy.FSDP),
    Strategy.HSDP: _hsdp,
    Strategy.DP: _dp,
    Strategy.NAIVE: _naive,
    Strategy.PIPELINE: _unavailable(Strategy.PIPELINE),
    Strategy.TENSOR: _unavailable(Strategy.TENSOR),
    Strategy.HYBRID: _unavailable(Strategy.HYBRID),
}
"""In the order in which equals are preferred: the simpler first."""
