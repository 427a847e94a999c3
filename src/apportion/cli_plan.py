"""`inspect` and `plan`: nothing runs, nothing is changed."""

from __future__ import annotations

from .api import plan as make_plan
from .cli_answer import Answer
from .cli_jobs import forecast, nothing_fits, profile_target
from .cli_schema import InspectOptions, PlanOptions
from .records import DeviceType
from .reporting import component_table, explain_bars, plan_table

# The tree is cut here on a terminal; --json and -v have all of it.
SHOWN_DEPTH = 4


def inspect(options: InspectOptions) -> Answer:
    """Answer with the profile of a target's model."""
    profile = profile_target(options, DeviceType.CUDA)
    depth = None if options.verbose else SHOWN_DEPTH
    return Answer(document=profile, views=(component_table(profile, depth=depth),))


def plan(options: PlanOptions) -> Answer:
    """Answer with the plan of a target on the devices; an error ends it when nothing fits."""
    known = forecast(options)
    made = make_plan(known.profile, known.cluster, known.limits)
    views: tuple[object, ...] = (plan_table(made),)
    if made.best is not None:
        views += (explain_bars(made.best, known.limits.memory_bytes or made.cluster.device_memory_bytes),)
    error = nothing_fits(made) if made.best is None else None
    return Answer(document=made, views=views, notes=known.cluster.warnings, error=error)
