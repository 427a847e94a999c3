"""Profile, cluster and layout -> Estimate. Pure functions on records; never imports torch."""

from .collective import Group, all_gather_seconds, all_reduce_seconds, broadcast_seconds, reduce_scatter_seconds
from .estimate import estimate, weakest_device
from .layout import Layout
from .optimizer import OPTIMIZERS, find_optimizer
from .strategies import STRATEGIES, StrategyCost
from .workload import BlockLoad, Workload, summarize

__all__ = [
    "OPTIMIZERS",
    "STRATEGIES",
    "BlockLoad",
    "Group",
    "Layout",
    "StrategyCost",
    "Workload",
    "all_gather_seconds",
    "all_reduce_seconds",
    "broadcast_seconds",
    "estimate",
    "find_optimizer",
    "reduce_scatter_seconds",
    "summarize",
    "weakest_device",
]
