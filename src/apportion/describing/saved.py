"""The saved calibration of this machine: `calibration-HOST-DEVICE.toml` in the cache directory."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from ..records import Cluster, DeviceType
from .files import cluster_to_toml, read_cluster


def cache_dir() -> Path:
    """Return the cache directory: APPORTION_CACHE, or `apportion` in the user's cache."""
    own = os.environ.get("APPORTION_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "apportion"


def calibration_path(device_type: DeviceType) -> Path:
    """Return where the calibration of this host's devices of a type is kept."""
    return cache_dir() / f"calibration-{platform.node() or 'host'}-{device_type.value}.toml"


def save_calibration(cluster: Cluster) -> Path:
    """Write a calibrated cluster to the cache, whole or not at all; return the file."""
    path = calibration_path(cluster.device.type)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}.tmp")
    beside.write_text(cluster_to_toml(cluster), encoding="utf-8")
    beside.replace(path)
    return path


def read_calibration(device_type: DeviceType) -> Cluster | None:
    """Return the saved calibration, or None where there is none.

    Raises: OptionError if the file is there and cannot be read.
    """
    path = calibration_path(device_type)
    return read_cluster(path) if path.is_file() else None
