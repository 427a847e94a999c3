"""One batch over many parts, exactly: losses, statistics, random numbers and buffers of the global batch."""

from .draws import DrawLog, DrawMode, DrawScope, DrawSite, DrawStream, DrawWatch, find_sites, seeded_python
from .exchange import (
    CountingExchange,
    DelayedExchange,
    Exchange,
    GroupExchange,
    LocalExchange,
    Part,
    RecordingExchange,
    ReplayError,
    ReplayExchange,
)
from .gathering import RowGatherer, Rows, WholeGatherer, find_rows
from .losses import GatherPlan, PartLoss, check_scalar, is_total_and_count, loss_function, part_loss
from .slicing import Dims, find_dims, num_samples, slice_batch, spread_samples
from .states import ModuleState, buffers_of, clone_buffers, equal_values, find_rule, restore_buffers
from .statistics import GlobalStatistics
from .trees import flatten, hidden_tensors, map_tensors, tensors

__all__ = [
    "CountingExchange",
    "DelayedExchange",
    "Dims",
    "DrawLog",
    "DrawMode",
    "DrawScope",
    "DrawSite",
    "DrawStream",
    "DrawWatch",
    "Exchange",
    "GatherPlan",
    "GlobalStatistics",
    "GroupExchange",
    "LocalExchange",
    "ModuleState",
    "Part",
    "PartLoss",
    "RecordingExchange",
    "ReplayError",
    "ReplayExchange",
    "RowGatherer",
    "Rows",
    "WholeGatherer",
    "buffers_of",
    "check_scalar",
    "clone_buffers",
    "equal_values",
    "find_dims",
    "find_rows",
    "find_rule",
    "find_sites",
    "flatten",
    "hidden_tensors",
    "is_total_and_count",
    "loss_function",
    "map_tensors",
    "num_samples",
    "part_loss",
    "restore_buffers",
    "seeded_python",
    "slice_batch",
    "spread_samples",
    "tensors",
]
