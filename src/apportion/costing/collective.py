"""Time of collectives between the ranks of a group that spans nodes.

Model:  rings (Patarasuk and Yuan 2009). Within a node each device moves (d-1)/d of the payload; between n
        nodes each of a node's d devices carries its d-th part through its own port; both stages are
        pipelined, so the slower one decides, and the latencies of all steps add up.
Units:  bytes of the whole (gathered) tensor in, seconds out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..records import Link

# The part of a link's rate that collectives reach; round figures, not measured here. NVLink: about 235 of
# 300 GB/s (DGX A100) and 365 of 450 GB/s (DGX H100, without NVLink SHARP), public nccl-tests all_reduce runs on
# eight devices. Network: about 46 of 50 GB/s per 400 Gb/s port. PCIe and Infinity Fabric: assumptions. A rate
# measured with collectives counts whole.
LINK_EFFICIENCY: Mapping[str, float] = {
    "nvlink": 0.8,
    "infinity-fabric": 0.7,
    "pcie": 0.7,
    "network": 0.9,
}

# What a collective takes on gloo against half an all_reduce, which is what a ring needs: two ranks of one
# machine, torch 2.13, 16.8 MB, fastest of 30 on a busy machine: all_reduce 24.8 ms, all_gather 25.1 ms,
# reduce_scatter 36.1 ms; only their ratio is used.
_GLOO_ALL_GATHER = 2.0
_GLOO_REDUCE_SCATTER = 2.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """`num_nodes` nodes with `ranks_per_node` ranks of the group in each."""

    num_nodes: int
    ranks_per_node: int
    intra_node: Link
    inter_node: Link

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.ranks_per_node < 1:
            raise ValueError("a group has at least one rank")

    @property
    def size(self) -> int:
        return self.num_nodes * self.ranks_per_node


def _rate(link: Link) -> float:
    return link.bandwidth_bytes_per_second * LINK_EFFICIENCY.get(link.kind, 1.0)


def _latency_seconds(group: Group) -> float:
    within = (group.ranks_per_node - 1) * group.intra_node.latency_seconds
    return within + (group.num_nodes - 1) * group.inter_node.latency_seconds


def _ring_seconds(payload_bytes: float, group: Group) -> float:
    """Return the time of one way round: a gather or a reduction of `payload_bytes`."""
    if group.size == 1:
        return 0.0
    n, d = group.num_nodes, group.ranks_per_node
    within = (d - 1) / d * payload_bytes / _rate(group.intra_node)
    between = (n - 1) / n * payload_bytes / d / _rate(group.inter_node)
    return max(within, between) + _latency_seconds(group)


def _on_gloo(group: Group, factor: float) -> float:
    return factor if group.intra_node.kind == "gloo" else 1.0


def all_gather_seconds(payload_bytes: float, group: Group) -> float:
    """Return the time until every rank holds all `payload_bytes`, of which each brought an equal part."""
    return _ring_seconds(payload_bytes, group) * _on_gloo(group, _GLOO_ALL_GATHER)


def reduce_scatter_seconds(payload_bytes: float, group: Group) -> float:
    """Return the time until every rank holds its part of the sum of `payload_bytes` from each."""
    return _ring_seconds(payload_bytes, group) * _on_gloo(group, _GLOO_REDUCE_SCATTER)


def all_reduce_seconds(payload_bytes: float, group: Group) -> float:
    """Return the time until every rank holds the sum of `payload_bytes` from each."""
    return 2 * _ring_seconds(payload_bytes, group)


def broadcast_seconds(payload_bytes: float, group: Group) -> float:
    """Return the time until every rank holds the `payload_bytes` of one."""
    if group.size == 1:
        return 0.0
    within = payload_bytes / _rate(group.intra_node) if group.ranks_per_node > 1 else 0.0
    between = payload_bytes / group.ranks_per_node / _rate(group.inter_node) if group.num_nodes > 1 else 0.0
    return max(within, between) + _latency_seconds(group)


def point_to_point_seconds(payload_bytes: float, link: Link) -> float:
    """Return the time of one transfer."""
    return payload_bytes / _rate(link) + link.latency_seconds
