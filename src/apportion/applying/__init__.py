"""A module and a candidate become a module on its ranks."""

from .apply import (
    REPLICATED,
    SHARDED,
    Applied,
    StepModule,
    apply,
    block_names,
    broadcast_state,
    check_candidate,
)
from .optimizers import check_module, check_parameters, make_optimizer

__all__ = [
    "REPLICATED",
    "SHARDED",
    "Applied",
    "StepModule",
    "apply",
    "block_names",
    "broadcast_state",
    "check_candidate",
    "check_module",
    "check_parameters",
    "make_optimizer",
]
