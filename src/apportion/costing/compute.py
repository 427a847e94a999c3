"""Time of forward, backward and recomputation on one device, by roofline.

Model:  matmul FLOPs at their reachable rate plus the operators' memory traffic at the memory rate. The two are
        added, not maximised: kernels that move more per FLOP reach less of the peak, and eager operators
        between them do not overlap. A backward moves twice what its forward moves (it reads the incoming
        gradient and the saved operand, writes one gradient).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..records import Checkpointing, Device, DeviceType, Precision
from .workload import BlockLoad, Workload

# Without a figure of the device's own (Device.efficiency): an assumption for CUDA. A CPU's peak is a measured
# matmul rate.
MATMUL_EFFICIENCY: Mapping[DeviceType, float] = {DeviceType.CPU: 1.0, DeviceType.CUDA: 0.7}
# Large copies reach 0.91 of the datasheet rate (H100 NVL, 4 GiB); training's operators are smaller.
MEMORY_EFFICIENCY: Mapping[DeviceType, float] = {DeviceType.CPU: 1.0, DeviceType.CUDA: 0.85}
# One call of nn.Linear(8, 8) or nn.LayerNorm(8) on one core of a busy machine, torch 2.13: 20 us forward and
# 30 us backward. On a GPU the host needs as long to launch, beside the device: the longer of the two counts.
FORWARD_CALL_SECONDS = 20e-6
BACKWARD_CALL_SECONDS = 30e-6
BACKWARD_TRAFFIC = 2.0
# Bytes per value under autocast against fp32. A transformer block keeps, in values per token and channel: two
# norm inputs in fp32, and norm outputs (2), q k v (3), attention result (1), both sides of the activation (8)
# in 16 bit: 36 bytes against 64.
AUTOCAST_BYTES = 36 / 64
_CAST_TRAFFIC_BYTES = 6  # reads 4 bytes and writes 2 per weight, once per forward

HALF = frozenset({Precision.FP16, Precision.BF16})


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSeconds:
    """Seconds of one micro-batch in one block; `overhead` is what calls cost beyond the work."""

    forward: float
    backward: float
    recompute: float
    overhead: float


def casts(workload: Workload, precision: Precision) -> bool:
    """Return whether autocast makes 16-bit copies of the weights."""
    return precision in HALF and not workload.half


def bytes_scale(workload: Workload, precision: Precision) -> float:
    """Return the bytes per activation value against those of the profile."""
    return AUTOCAST_BYTES if casts(workload, precision) else 1.0


def arithmetic(workload: Workload, device: Device, precision: Precision) -> str:
    """Return the precision whose rate counts: that of 16-bit weights where the model has them."""
    if workload.half and precision not in HALF:
        return "bf16" if "bf16" in device.peak_flops_per_second else "fp16"
    return precision.value


def peak_rate(workload: Workload, device: Device, precision: Precision) -> float:
    """Return the dense peak in FLOP/s, that of fp32 where the device has none for the precision."""
    peaks = device.peak_flops_per_second
    return peaks.get(arithmetic(workload, device, precision)) or peaks["fp32"]


def matmul_rate(workload: Workload, device: Device, precision: Precision) -> float:
    """Return the FLOP/s that large matmuls reach."""
    name = arithmetic(workload, device, precision)
    efficiency = device.efficiency.get(name, MATMUL_EFFICIENCY[device.type])
    return peak_rate(workload, device, precision) * efficiency


def memory_rate(device: Device) -> float:
    """Return the bytes per second that operators move."""
    return device.memory_bytes_per_second * device.efficiency.get("memory", MEMORY_EFFICIENCY[device.type])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device does per second for one workload and precision."""

    flops_per_second: float
    bytes_per_second: float
    bytes_scale: float
    casts: bool
    overlapped_calls: bool


def rates(workload: Workload, device: Device, precision: Precision) -> Rates:
    """Return the rates of a device for a workload."""
    return Rates(
        flops_per_second=matmul_rate(workload, device, precision),
        bytes_per_second=memory_rate(device),
        bytes_scale=bytes_scale(workload, precision),
        casts=casts(workload, precision),
        overlapped_calls=device.type is DeviceType.CUDA,
    )


def block_seconds(block: BlockLoad, samples: float, speed: Rates, checkpointing: Checkpointing) -> BlockSeconds:
    """Return the seconds of one micro-batch of `samples` in a block.

    Source: recomputation of everything but matmul and attention results, Korthikanti et al. 2022, section 5.
    """
    moved = (block.traffic_bytes * samples + block.weight_traffic_bytes) * speed.bytes_scale
    cast = _CAST_TRAFFIC_BYTES * block.parameters / speed.bytes_per_second if speed.casts else 0.0
    memory = moved / speed.bytes_per_second
    work = block.forward_flops * samples / speed.flops_per_second
    forward = work + memory + cast
    frozen = block.forward_flops > 0 and not block.backward_flops
    backward = block.backward_flops * samples / speed.flops_per_second
    backward += 0.0 if frozen else memory * BACKWARD_TRAFFIC
    again = {
        Checkpointing.NONE: 0.0,
        Checkpointing.SELECTIVE: memory + cast,
        Checkpointing.FULL: forward,
    }[checkpointing]
    passes = 2 if again else 1
    host = block.calls * (FORWARD_CALL_SECONDS * passes + BACKWARD_CALL_SECONDS)
    work_seconds = forward + backward + again
    overhead = max(0.0, host - work_seconds) if speed.overlapped_calls else host
    return BlockSeconds(forward=forward, backward=backward, recompute=again, overhead=overhead)
