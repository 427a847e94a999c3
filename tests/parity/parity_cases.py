"""The handed modules, the plans they run under, and how one is verified on the ranks of a pool."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from apportion.batching import find_dims, num_samples
from apportion.describing import describe
from apportion.errors import PlanError
from apportion.planning import make_plan
from apportion.profiling import profile_parts
from apportion.reading import JobParts, read_target
from apportion.records import Candidate, DeviceType, Job, Limits, Parity, ParityStatus, Strategy
from apportion.running.verify import verify_rank

CASES_DIR = Path(__file__).resolve().parents[3] / "shared" / "cases"
CASES = tuple(sorted(path.stem for path in CASES_DIR.glob("case*.py")))
needs_cases = pytest.mark.skipif(not CASES, reason=f"the handed modules are not at {CASES_DIR}")


def read_case(name: str) -> JobParts:
    return read_target(str(CASES_DIR / f"{name}.py"), overrides={}, seq_len=None)


def samples_of(parts: JobParts) -> int:
    batch = parts.example(1 << 20)
    return num_samples(batch, parts.batch_dims or find_dims(batch))


def candidate_for(parts: JobParts, strategy: Strategy, world_size: int, *, num_micro: int = 1) -> Candidate:
    """Return the planner's candidate of that strategy, as the command line would use it."""
    size = samples_of(parts)
    profile = profile_parts(parts, batch_samples=size, device_type=DeviceType.CPU)
    micro = -(-size // (world_size * num_micro))
    limits = Limits(strategy=strategy, batch_size=size, micro_batch_size=micro)
    plan = make_plan(profile, describe(f"local:{world_size}"), limits)
    if plan.best is None:
        raise PlanError(plan.smallest_change)
    return plan.best


def verify_case(rank: int, name: str, candidate: Candidate, steps: int = 3) -> Parity:
    parts = read_case(name)
    with warnings.catch_warnings():
        # the module of case50 uses the old weight_norm on purpose
        warnings.filterwarnings("ignore", message=".*weight_norm.*", category=FutureWarning)
        return verify_rank(parts, Job(target=name, batch_size=samples_of(parts)), candidate, steps)


def row(name: str, parity: Parity) -> str:
    """Return one line of the parity table."""
    errors = parity.relative_error
    if parity.status is not ParityStatus.EQUAL:
        return f"{name:8} {parity.status.value:8} {parity.reason.splitlines()[0]}"
    return (
        f"{name:8} equal    loss {errors.loss:.0e}  gradients {errors.gradients:.0e}  "
        f"weights {errors.weights:.0e}  buffers {errors.buffers:.0e}"
    )
