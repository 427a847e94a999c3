"""The machines: devices, nodes and the links between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class DeviceType(Enum):
    """What torch calls the device type."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device that runs one rank.

    Units: memory in bytes; `peak_flops_per_second` is the dense peak by precision name
    (`fp32`, `tf32`, `fp16`, `bf16`, `fp8`); `memory_bytes_per_second` is the device-memory bandwidth.
    `efficiency` is the part of the peak which large matmuls reach, by precision, and of the bandwidth which
    copies reach, as `memory`.
    """

    kind: str
    type: DeviceType
    memory_bytes: int
    peak_flops_per_second: Mapping[str, float]
    memory_bytes_per_second: float
    efficiency: Mapping[str, float] = field(default_factory=dict)
    source: str = ""

    def __post_init__(self) -> None:
        if self.memory_bytes <= 0:
            raise ValueError(f"device {self.kind} has {self.memory_bytes} bytes of memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link as one device sees it: one-directional bytes per second and the latency of one message."""

    kind: str
    bandwidth_bytes_per_second: float
    latency_seconds: float

    def __post_init__(self) -> None:
        if self.bandwidth_bytes_per_second <= 0 or self.latency_seconds < 0:
            raise ValueError(f"link {self.kind} has an impossible bandwidth or latency")


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """`count` equal nodes of `devices_per_node` equal devices."""

    device: Device
    devices_per_node: int
    count: int = 1
    host_memory_bytes: int = 0
    cores: int = 0

    def __post_init__(self) -> None:
        if self.devices_per_node < 1 or self.count < 1:
            raise ValueError("a node needs at least one device")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes and links. `inter_node` is per device, already divided by the oversubscription."""

    name: str
    nodes: tuple[Node, ...]
    intra_node: Link
    inter_node: Link
    oversubscription: float = 1.0
    dollars_per_hour: float | None = None
    calibrated: bool = False
    warnings: tuple[str, ...] = field(default=())

    @property
    def num_devices(self) -> int:
        return sum(node.devices_per_node * node.count for node in self.nodes)

    @property
    def num_nodes(self) -> int:
        return sum(node.count for node in self.nodes)

    @property
    def device(self) -> Device:
        """The device with the least memory: what must fit everywhere must fit there."""
        return min((node.device for node in self.nodes), key=lambda device: device.memory_bytes)
