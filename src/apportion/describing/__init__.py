"""A `--devices` spec, a file or this machine -> Cluster. Importing it imports neither torch nor tomlkit."""

from ..records import Cluster
from .catalogue import find_instance, find_kind, kinds
from .files import cluster_from_toml, cluster_to_toml, read_cluster
from .spec import describe

__all__ = [
    "calibrate",
    "cluster_from_toml",
    "cluster_to_toml",
    "describe",
    "find_instance",
    "find_kind",
    "kinds",
    "read_cluster",
    "save_calibration",
]


def calibrate() -> Cluster:
    """Return this machine with measured rates (`calibration.measure_machine`); takes a few seconds.

    Raises: RankError if the two processes that measure the link fail.
    """
    from .calibration import measure_machine  # imports torch

    return measure_machine()


def save_calibration(cluster: Cluster) -> str:
    """Keep a calibrated cluster for later `describe("local")` calls; return the path of the file."""
    from .saved import save_calibration as save

    return str(save(cluster))
