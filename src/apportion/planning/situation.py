"""What a plan is made for, checked: the model, the machines and what the user fixed."""

from __future__ import annotations

from dataclasses import dataclass

from ..costing import STRATEGIES, Workload, find_optimizer, summarize, weakest_device
from ..describing.catalogue import nearest
from ..errors import OptionError, PlanError
from ..records import Cluster, Device, DeviceType, Limits, Precision, Profile, Schedule, Strategy
from ..units import format_bytes

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
_UNAVAILABLE_AXES = {
    "tp": "tensor parallelism",
    "pp": "pipeline parallelism",
    "cp": "context parallelism",
    "ep": "expert parallelism",
}
UNAVAILABLE = {
    Strategy.PIPELINE: "pipeline parallelism is not available yet",
    Strategy.TENSOR: "tensor parallelism is not available yet",
    Strategy.HYBRID: "combining pipeline, tensor and data parallelism is not available yet",
}
INSTEAD = "fsdp shards parameters, gradients and optimizer state over the same devices"


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Everything a search needs. `usable_bytes` is the memory per device; `replicate` and `shard` are the
    degrees that the user's mesh fixes, 0 where it leaves them open."""

    profile: Profile
    workload: Workload
    cluster: Cluster
    device: Device
    limits: Limits
    precision: Precision
    usable_bytes: int
    num_devices: int
    replicate: int = 0
    shard: int = 0

    @property
    def on_cpu(self) -> bool:
        return self.device.type is DeviceType.CPU

    def asked(self, strategy: Strategy) -> bool:
        """Whether the user asked for `strategy` by name."""
        return self.limits.strategy is strategy


def consider(
    profile: Profile, cluster: Cluster, limits: Limits, *, workload: Workload | None = None
) -> Situation:
    """Return the situation, or refuse what no layout can do.

    Raises: OptionError for values that cannot be used, PlanError for what this version or device cannot do.
    """
    _check_values(limits)
    _check_available(limits)
    device = weakest_device(cluster)
    replicate, shard = _degrees(limits, cluster.num_devices)
    situation = Situation(
        profile=profile,
        workload=workload or summarize(profile),
        cluster=cluster,
        device=device,
        limits=limits,
        precision=_precision(limits, device),
        usable_bytes=min(device.memory_bytes, limits.memory_bytes or device.memory_bytes),
        num_devices=cluster.num_devices,
        replicate=replicate,
        shard=shard,
    )
    _check_batch(situation)
    return situation


def _check_values(limits: Limits) -> None:
    find_optimizer(limits.optimizer)
    for name, value in (("--batch-size", limits.batch_size), ("--micro-batch-size", limits.micro_batch_size)):
        if value is not None and value < 1:
            raise OptionError(f"{name} is {value}", try_="give a whole number from 1")
    if limits.memory_bytes is not None and limits.memory_bytes < 1:
        raise OptionError(f"--memory-limit is {limits.memory_bytes} bytes", try_="write it like 40GiB")
    for axis, degree in limits.mesh.items():
        if axis not in AXES:
            raise OptionError(f"no mesh axis '{axis}'", try_=nearest(axis, AXES))
        if degree < 1:
            raise OptionError(f"--{axis.replace('_', '-')} is {degree}", try_="a degree is at least 1")
    if limits.zero_stage is not None and limits.zero_stage not in range(4):
        raise OptionError(f"--zero is {limits.zero_stage}", try_="0, 1, 2 or 3")


def _check_available(limits: Limits) -> None:
    if limits.strategy in UNAVAILABLE:
        raise PlanError(UNAVAILABLE[limits.strategy], try_=INSTEAD)
    for axis, what in _UNAVAILABLE_AXES.items():
        naive = axis == "pp" and limits.strategy is Strategy.NAIVE
        if limits.mesh.get(axis, 1) > 1 and not naive:
            raise PlanError(f"{what} is not available yet", found=f"{axis}={limits.mesh[axis]}", try_=INSTEAD)
    if limits.schedule not in (None, Schedule.NONE):
        raise PlanError(
            "pipeline schedules are not available yet", found=limits.schedule.value, try_="leave --schedule out"
        )
    if limits.virtual_stages not in (None, 1):
        raise PlanError(
            "virtual pipeline stages are not available yet",
            found=str(limits.virtual_stages),
            try_="leave --virtual-stages out",
        )
    if limits.sequence_parallel:
        raise PlanError("sequence parallelism is not available yet", try_="--sequence-parallel off")
    if limits.precision is Precision.FP8:
        raise PlanError("fp8 training is not available yet", try_="--precision bf16")
    _check_zero(limits)


def _check_zero(limits: Limits) -> None:
    if limits.strategy is None or limits.zero_stage is None:
        return
    stage = STRATEGIES[limits.strategy].zero_stage
    if stage != limits.zero_stage:
        raise OptionError(
            f"--strategy {limits.strategy.value} is ZeRO stage {stage}, but --zero says {limits.zero_stage}",
            try_="leave one of the two out",
        )


def _precision(limits: Limits, device: Device) -> Precision:
    """Return what the user fixed; else bf16 on GPUs that have it, as is usual, and fp32 elsewhere."""
    known = device.peak_flops_per_second
    if limits.precision is None:
        gpu = device.type is DeviceType.CUDA
        return Precision.BF16 if gpu and "bf16" in known else Precision.FP32
    if limits.precision.value not in known:
        raise PlanError(
            f"{device.kind} does not do {limits.precision.value}",
            found=f"it does {', '.join(known)}",
            try_=f"--precision {'bf16' if 'bf16' in known else 'fp32'}",
        )
    return limits.precision


def _degrees(limits: Limits, num_devices: int) -> tuple[int, int]:
    """Return dp_replicate and dp_shard as fixed, each from the other where one is left open."""
    replicate, shard = limits.mesh.get("dp_replicate", 0), limits.mesh.get("dp_shard", 0)
    if not replicate and not shard:
        return 0, 0
    replicate = replicate or num_devices // shard
    shard = shard or num_devices // replicate
    if replicate * shard != num_devices:
        given = " x ".join(f"{axis} {limits.mesh[axis]}" for axis in AXES[:2] if axis in limits.mesh)
        raise OptionError(
            f"a mesh of {given} does not use {num_devices} devices",
            found=f"{num_devices} devices",
            try_="degrees whose product is the number of devices",
        )
    return replicate, shard


def _check_batch(situation: Situation) -> None:
    limits, ranks = situation.limits, situation.num_devices
    if limits.strategy in (Strategy.SINGLE, Strategy.NAIVE):
        ranks = 1
    if limits.batch_size < ranks:
        raise OptionError(
            f"a batch of {limits.batch_size} samples cannot be split over {ranks} ranks",
            try_=f"--batch-size {ranks} or more, or {limits.batch_size} devices",
        )
    local = -(-limits.batch_size // ranks)
    micro = limits.micro_batch_size
    if micro is not None and micro > local:
        raise OptionError(
            f"a micro-batch of {micro} samples is more than a rank has",
            found=f"{limits.batch_size} samples over {ranks} ranks are {local} each",
            try_=f"--micro-batch-size {local} or less",
        )
    if situation.profile.batch_norms and micro is not None and micro < local:
        raise PlanError(
            "batch-norm needs the statistics of the whole batch: micro-batches would change the answer",
            found=f"{situation.profile.batch_norms[0]}, {local} samples per rank, --micro-batch-size {micro}",
            try_=f"--micro-batch-size {local}",
        )


def memory_words(needed: float, usable: float) -> str:
    """Return `needs 2.8 GiB, device has 1.0 GiB`."""
    return f"needs {format_bytes(needed)}, device has {format_bytes(usable)}"
