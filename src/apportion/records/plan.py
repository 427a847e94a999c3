"""What to do, and what it should cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Strategy(Enum):
    """Every way of splitting that the planner knows; those it cannot offer are listed as excluded."""

    SINGLE = "single"
    DP = "dp"
    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    FSDP = "fsdp"
    HSDP = "hsdp"
    NAIVE = "naive"
    PIPELINE = "pipeline"
    TENSOR = "tensor"
    HYBRID = "hybrid"


class Checkpointing(Enum):
    """Activation checkpointing: nothing, all but matmul and attention results, or whole blocks recomputed."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class Precision(Enum):
    """The arithmetic of forward and backward; weights and optimizer state stay in their own type."""

    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"


class Schedule(Enum):
    """The order of a pipeline's micro-batches; NONE without a pipeline."""

    NONE = "none"
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved-1f1b"
    ZERO_BUBBLE = "zero-bubble"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Degrees of the mesh axes; their product is the number of ranks (ep lies inside dp_shard x cp)."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep"):
            if getattr(self, axis) < 1:
                raise ValueError(f"{axis} is {getattr(self, axis)}; a degree is at least 1")

    @property
    def num_ranks(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    @property
    def num_data_ranks(self) -> int:
        """Ranks that see different samples."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Parts of one optimizer step, in seconds; they add up to the step."""

    compute: float = 0.0
    recompute: float = 0.0
    bubble: float = 0.0
    tp_exposed: float = 0.0
    dp_exposed: float = 0.0
    pp_exposed: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on the peak rank at its peak."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    communication: int = 0
    other: int = 0
    peak: int = 0
    peak_rank: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Predicted time, memory and cost of one layout.

    Units: seconds, samples or tokens per second over the whole cluster, bytes, dollars. `mfu` counts model
    FLOPs (no recompute, causal attention in full) over the dense peak of all devices.
    """

    step_seconds: float
    samples_per_second: float
    tokens_per_second: float
    tflops_per_device: float
    mfu: float
    seconds: Seconds
    memory_bytes: Memory
    cost_per_million_tokens: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One pipeline stage: its components by fqn and the elements it holds."""

    stage: int
    components: tuple[str, ...]
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One layout with its prediction. `micro_batch_size` is samples per rank and forward pass."""

    name: str
    strategy: Strategy
    mesh: Mesh
    micro_batch_size: int
    grad_accumulation: int
    schedule: Schedule = Schedule.NONE
    virtual_stages: int = 1
    activation_checkpointing: Checkpointing = Checkpointing.NONE
    sequence_parallel: bool = False
    zero_stage: int = 0
    precision: Precision = Precision.FP32
    stages: tuple[Stage, ...] = ()
    fits: bool = True
    estimate: Estimate
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Excluded:
    """A strategy that is not offered, and why. `short_by_bytes` is 0 unless memory is the reason."""

    name: str
    reason: str
    short_by_bytes: int = 0
    try_: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """Name, number of parameters and of components."""

    name: str
    parameters: int
    components: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSummary:
    """Size and kind of the cluster; `device_memory_bytes` is what one device may use (0: not stated)."""

    devices: int
    nodes: int
    kind: str
    device_memory_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer to "how should I split this?": the pick, the others, and what is excluded.

    `best` is None when nothing fits; `smallest_change` then says what would fit.
    """

    schema: int = 1
    model: ModelSummary
    cluster: ClusterSummary
    best: Candidate | None
    candidates: tuple[Candidate, ...] = ()
    excluded: tuple[Excluded, ...] = ()
    smallest_change: str = ""
    batch_size: int = 0
    warnings: tuple[str, ...] = ()
    searched: int = 0
    search_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the user fixed; None (or an empty mapping) means searched.

    Units: `memory_bytes` is the usable memory per device, `batch_size` global samples.
    """

    strategy: Strategy | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)
    zero_stage: int | None = None
    schedule: Schedule | None = None
    virtual_stages: int | None = None
    micro_batch_size: int | None = None
    activation_checkpointing: Checkpointing | None = None
    sequence_parallel: bool | None = None
    precision: Precision | None = None
    memory_bytes: int | None = None
    optimizer: str = "adamw"
    batch_size: int = 32
