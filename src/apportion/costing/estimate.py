"""Price one layout."""

from __future__ import annotations

from dataclasses import fields

from ..records import Checkpointing, Cluster, Device, DeviceType, Estimate, Memory, Seconds
from .compute import block_seconds, memory_rate, peak_rate, rates
from .layout import Layout
from .memory import itemise
from .optimizer import OPERATOR_SECONDS, find_optimizer
from .strategies import STRATEGIES, Priced
from .workload import Workload


def weakest_device(cluster: Cluster) -> Device:
    """Return a device with the least of everything: parts are equal and wait for the slowest."""
    devices = [node.device for node in cluster.nodes]
    if len(devices) == 1:
        return devices[0]
    least = min(devices, key=lambda device: device.memory_bytes)
    shared = set.intersection(*(set(device.peak_flops_per_second) for device in devices))
    slowest = {name: min(devices, key=lambda d: d.peak_flops_per_second[name]) for name in shared}
    return Device(
        kind=least.kind,
        type=least.type,
        memory_bytes=least.memory_bytes,
        peak_flops_per_second={name: d.peak_flops_per_second[name] for name, d in slowest.items()},
        memory_bytes_per_second=min(device.memory_bytes_per_second for device in devices),
        efficiency={name: d.efficiency[name] for name, d in slowest.items() if name in d.efficiency},
        source=least.source,
    )


def estimate(workload: Workload, cluster: Cluster, layout: Layout) -> Estimate:
    """Return the predicted time, memory and cost of a layout.

    Units: `seconds` adds up to `step_seconds`; MFU is over the dense peak of the devices in use.
    Model: accumulation repeats forward, backward and recomputation; the exposed part of communication, the
           optimizer's memory traffic and the overhead of calls are added.
    """
    device = weakest_device(cluster)
    cost = STRATEGIES[layout.strategy]
    speed = rates(workload, device, layout.precision)
    samples = layout.local_batch / layout.grad_accumulation
    units = tuple(
        (block, block_seconds(block, samples, speed, layout.checkpointing)) for block in workload.blocks
    )
    rest = block_seconds(workload.rest, samples, speed, Checkpointing.NONE)
    priced = Priced(
        workload=workload, layout=layout, cluster=cluster, device=device, units=(*units, (workload.rest, rest))
    )
    exposed = cost.exposed(priced)
    share = cost.optimizer_share(workload, layout)
    passes = layout.grad_accumulation
    seconds = Seconds(
        compute=passes * sum((s.forward + s.backward) * block.count for block, s in priced.units),
        recompute=passes * sum(s.recompute * block.count for block, s in priced.units),
        dp_exposed=exposed.data,
        pp_exposed=exposed.placement,
        optimizer=_optimizer_seconds(workload, layout, device, share),
        other=passes * sum(s.overhead * block.count for block, s in priced.units),
    )
    memory = itemise(
        workload,
        layout,
        device,
        cost.footprint(workload, layout),
        temporary=_temporary_bytes(workload, device, share),
    )
    return _rated(
        workload, cluster, layout, seconds, memory, peak=peak_rate(workload, device, layout.precision)
    )


def _optimizer_seconds(workload: Workload, layout: Layout, device: Device, share: float) -> float:
    cost = find_optimizer(layout.optimizer)
    moved = cost.traffic * workload.trainable_bytes * share / memory_rate(device)
    if device.type is DeviceType.CUDA:  # one launch for many tensors (foreach)
        return moved
    tensors = workload.num_tensors * (1.0 if layout.mesh.dp_shard > 1 else share)
    return moved + cost.operations * OPERATOR_SECONDS * tensors


def _temporary_bytes(workload: Workload, device: Device, share: float) -> float:
    """Return the temporaries of the optimizer step.

    Source: torch.optim documentation of `foreach` (the default on CUDA): about the size of the parameters
            more than the loop, which needs those of one parameter.
    """
    if device.type is DeviceType.CUDA:
        return workload.trainable_bytes * share
    return float(min(workload.largest_parameter_bytes, workload.trainable_bytes * share))


def _rated(
    workload: Workload, cluster: Cluster, layout: Layout, seconds: Seconds, memory: Memory, *, peak: float
) -> Estimate:
    step = sum(getattr(seconds, field.name) for field in fields(seconds))
    tokens = workload.tokens_per_sample * layout.batch_size
    flops = (workload.forward_flops + workload.backward_flops) * layout.batch_size
    per_device = flops / step / layout.num_devices
    hourly = cluster.dollars_per_hour
    cost = None
    if hourly is not None and tokens:
        cost = hourly / 3600 * step / tokens * 1e6
    return Estimate(
        step_seconds=step,
        samples_per_second=layout.batch_size / step,
        tokens_per_second=tokens / step,
        tflops_per_device=per_device / 1e12,
        mfu=per_device / peak,
        seconds=seconds,
        memory_bytes=memory,
        cost_per_million_tokens=cost,
    )
