"""The words for what the records hold, shared by the terminal and the page."""

from __future__ import annotations

from ..records import Candidate, Checkpointing, Memory, Mesh, Plan, Seconds
from ..units import format_bytes, format_count
from .figures import plural

_CHECKPOINTING = {
    Checkpointing.NONE: "no recomputation",
    Checkpointing.SELECTIVE: "selective recomputation",
    Checkpointing.FULL: "full recomputation",
}
_AXES = {
    "dp_replicate": "replicas",
    "dp_shard": "shards",
    "cp": "context parts",
    "tp": "tensor parts",
    "pp": "pipeline stages",
    "ep": "expert parts",
}


def memory_parts(memory: Memory) -> tuple[tuple[str, int], ...]:
    """Return the parts of the peak in bytes, by name, in the order they are drawn."""
    return (
        ("parameters", memory.parameters),
        ("gradients", memory.gradients),
        ("optimizer state", memory.optimizer),
        ("activations", memory.activations),
        ("communication", memory.communication),
        ("other", memory.other),
    )


def time_parts(seconds: Seconds) -> tuple[tuple[str, float], ...]:
    """Return the parts of a step in seconds, by name, in the order they are drawn."""
    return (
        ("compute", seconds.compute),
        ("recomputation", seconds.recompute),
        ("pipeline bubble", seconds.bubble),
        ("data exchange", seconds.dp_exposed),
        ("tensor exchange", seconds.tp_exposed),
        ("stage exchange", seconds.pp_exposed),
        ("optimizer", seconds.optimizer),
        ("other", seconds.other),
    )


def describe_model(plan: Plan) -> str:
    """Return `gpt: 124.4M parameters in 98 components; 8 x H100; batch of 256`."""
    model, cluster = plan.model, plan.cluster
    nodes = f" on {plural(cluster.nodes, 'node')}" if cluster.nodes > 1 else ""
    memory = f", {format_bytes(cluster.device_memory_bytes)} each" if cluster.device_memory_bytes else ""
    batch = f"; batch of {plan.batch_size:,}" if plan.batch_size else ""
    return (
        f"{model.name}: {format_count(model.parameters)} parameters in "
        f"{plural(model.components, 'component')}; {cluster.devices:,} x {cluster.kind}{nodes}{memory}{batch}"
    )


def describe_mesh(mesh: Mesh) -> str:
    """Return the degrees above one: `2 replicas x 4 shards`; `1 rank` where there are none."""
    parts = [f"{getattr(mesh, axis)} {word}" for axis, word in _AXES.items() if getattr(mesh, axis) > 1]
    return " x ".join(parts) or "1 rank"


def describe_settings(candidate: Candidate) -> str:
    """Return how a step is run: `micro-batch 8, 4 accumulated, no recomputation, bf16`."""
    parts = [f"micro-batch {candidate.micro_batch_size}"]
    if candidate.grad_accumulation > 1:
        parts.append(f"{candidate.grad_accumulation} accumulated")
    parts += [describe_checkpointing(candidate.activation_checkpointing), candidate.precision.value]
    if candidate.schedule.value != "none":
        parts.append(f"{candidate.schedule.value} schedule")
    if candidate.virtual_stages > 1:
        parts.append(f"{candidate.virtual_stages} virtual stages")
    if candidate.sequence_parallel:
        parts.append("sequence parallel")
    return ", ".join(parts)


def describe_checkpointing(checkpointing: Checkpointing) -> str:
    """Return the words for activation checkpointing."""
    return _CHECKPOINTING[checkpointing]


def format_cost(dollars: float | None) -> str:
    """Return the price of a million tokens: `$0.42`; `-` where the price is not known."""
    if dollars is None:
        return "-"
    return f"${dollars:.2f}" if dollars >= 0.1 else f"${dollars:.2g}"
