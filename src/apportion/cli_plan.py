"""`inspect` and `plan`: nothing runs, nothing is changed."""

from __future__ import annotations

from .api import plan as make_plan
from .cli_answer import Answer
from .cli_jobs import batch_size_of, nothing_fits, prepare, read_parts
from .cli_schema import InspectOptions, PlanOptions
from .profiling import profile_parts
from .reporting import component_table, explain_bars, plan_table

# The tree is cut here on a terminal; --json has all of it.
SHOWN_DEPTH = 4


def inspect(options: InspectOptions) -> Answer:
    """Answer with the profile of a target's model."""
    parts = read_parts(options)
    profile = profile_parts(parts, batch_samples=batch_size_of(options, parts))
    depth = None if options.verbose else SHOWN_DEPTH
    return Answer(document=profile, views=(component_table(profile, depth=depth),))


def plan(options: PlanOptions) -> Answer:
    """Answer with the plan of a target on the devices; an error ends it when nothing fits."""
    prepared = prepare(options)
    made = make_plan(prepared.profile, prepared.cluster, prepared.limits)
    views: tuple[object, ...] = (plan_table(made),)
    if made.best is not None:
        views += (explain_bars(made.best, prepared.limits.memory_bytes or made.cluster.device_memory_bytes),)
    error = nothing_fits(made) if made.best is None else None
    return Answer(document=made, views=views, notes=prepared.cluster.warnings, error=error)
