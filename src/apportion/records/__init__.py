"""Frozen records that travel between the stages. Standard library only; never imports torch."""

from .cluster import Cluster, Device, DeviceType, Link, Node
from .codec import from_json, from_json_text, to_json, to_json_text
from .job import Job
from .plan import (
    Candidate,
    Checkpointing,
    ClusterSummary,
    Estimate,
    Excluded,
    Limits,
    Memory,
    Mesh,
    ModelSummary,
    Plan,
    Precision,
    Schedule,
    Seconds,
    Stage,
    Strategy,
)
from .profile import Component, Method, Profile
from .report import Parity, ParityErrors, ParityStatus, Report, StepRecord, Worst
from .traits import BufferRule, LossKind, Refusal, Traits

__all__ = [
    "BufferRule",
    "Candidate",
    "Checkpointing",
    "Cluster",
    "ClusterSummary",
    "Component",
    "Device",
    "DeviceType",
    "Estimate",
    "Excluded",
    "Job",
    "Limits",
    "Link",
    "LossKind",
    "Memory",
    "Mesh",
    "Method",
    "ModelSummary",
    "Node",
    "Parity",
    "ParityErrors",
    "ParityStatus",
    "Plan",
    "Precision",
    "Profile",
    "Refusal",
    "Report",
    "Schedule",
    "Seconds",
    "Stage",
    "StepRecord",
    "Strategy",
    "Traits",
    "Worst",
    "from_json",
    "from_json_text",
    "to_json",
    "to_json_text",
]
