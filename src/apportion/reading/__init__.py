"""From a TARGET on the command line to the functions of a job.

Names are imported on first use: what only looks for a configuration file must not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .calling import default_forward, pair_forward
    from .checking import as_loss, check_batch, loss_value, recheck, run_forward
    from .one_batch import num_samples
    from .parts import Batch, JobParts
    from .target import read_target
    from .wording import describe_value

__all__ = [
    "Batch",
    "JobParts",
    "as_loss",
    "check_batch",
    "default_forward",
    "describe_value",
    "loss_value",
    "num_samples",
    "pair_forward",
    "read_target",
    "recheck",
    "run_forward",
]

_HOMES = {
    "Batch": "parts",
    "JobParts": "parts",
    "as_loss": "checking",
    "check_batch": "checking",
    "default_forward": "calling",
    "describe_value": "wording",
    "loss_value": "checking",
    "num_samples": "one_batch",
    "pair_forward": "calling",
    "read_target": "target",
    "recheck": "checking",
    "run_forward": "checking",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
