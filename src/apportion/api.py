"""The six verbs, in the order of the flow."""

from __future__ import annotations

from collections.abc import Mapping

from . import describing, planning, profiling
from .reading import JobParts, read_target
from .records import Cluster, DeviceType, Limits, Plan, Profile


def describe(
    devices: str = "local",
    *,
    intra_node: str | None = None,
    inter_node: str | None = None,
    oversubscription: float = 1.0,
) -> Cluster:
    """Return the machines that `devices` names: `local`, `local:4`, `8xH100` or a `cluster.toml`."""
    return describing.describe(
        devices, intra_node=intra_node, inter_node=inter_node, oversubscription=oversubscription
    )


def profile(
    target: str | JobParts,
    *,
    batch_samples: int = 32,
    device_type: DeviceType = DeviceType.CUDA,
    overrides: Mapping[str, str] | None = None,
    seq_len: int | None = None,
) -> Profile:
    """Return what the model of a target costs, found without allocating its weights where that is possible."""
    parts = read_target(target, overrides=overrides, seq_len=seq_len) if isinstance(target, str) else target
    return profiling.profile_parts(parts, batch_samples=batch_samples, device_type=device_type)


def plan(profile: Profile, cluster: Cluster, limits: Limits | None = None) -> Plan:
    """Return the candidates, the pick and why; what `limits` leaves open is searched."""
    return planning.make_plan(profile, cluster, limits or Limits())
