"""Apportion: plan, run and prove parallel PyTorch training.

Names are imported on first use, so that `import apportion` costs nearly nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api import apply, describe, plan, profile, report, run
    from .errors import ApportionError
    from .reading import JobParts, read_target
    from .records import Candidate, Cluster, Job, Limits, Parity, Plan, Profile, Report
    from .running.parallel import parallelize
    from .running.session import Session, StepResult

__version__ = "0.1.0"

__all__ = [
    "ApportionError",
    "Candidate",
    "Cluster",
    "Job",
    "JobParts",
    "Limits",
    "Parity",
    "Plan",
    "Profile",
    "Report",
    "Session",
    "StepResult",
    "apply",
    "describe",
    "parallelize",
    "plan",
    "profile",
    "read_target",
    "report",
    "run",
]

_HOMES = {
    "ApportionError": "errors",
    "JobParts": "reading",
    "Session": "running.session",
    "StepResult": "running.session",
    "parallelize": "running.parallel",
    "read_target": "reading",
} | dict.fromkeys(("apply", "describe", "plan", "profile", "report", "run"), "api")


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES.get(name, 'records')}", __name__), name)
