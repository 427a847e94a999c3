"""A run directory as one Report."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from ..errors import OptionError
from ..records import Job, Parity, Plan, Report, StepRecord, from_json_text
from .figures import plural
from .metrics import read_metrics, read_validation
from .verdict import median_seconds

T = TypeVar("T")


def read_run(run_dir: Path) -> Report:
    """Return what `plan.json`, `job.json`, `parity.json` and the metrics files of a run say.

    Only `plan.json` must be there. The step time is the median after the warm-up.
    Raises: OptionError if there is no run, or a file of it cannot be read.
    """
    plan = _read(run_dir / "plan.json", Plan)
    if plan is None:
        raise OptionError(
            f"{run_dir} is not a run directory",
            found="no plan.json in it" if run_dir.is_dir() else "no such folder",
            try_="give the directory that apportion train --run-dir wrote",
        )
    job = _read(run_dir / "job.json", Job)
    steps = read_metrics(run_dir)
    validation = tuple(
        (item.step, name, value)
        for item in read_validation(run_dir)
        for name, value in sorted(item.metrics.items())
    )
    return Report(
        name=run_dir.resolve().name,
        plan=plan,
        world_size=plan.best.mesh.num_ranks if plan.best else 0,
        steps=steps,
        validation=validation,
        parity=_read(run_dir / "parity.json", Parity),
        measured_step_seconds=median_seconds(steps),
        measured_peak_bytes=max((record.memory for record in steps), default=0),
        outcome=_outcome(job, steps),
        notes=plan.warnings,
        job=job,
    )


def _read(path: Path, cls: type[T]) -> T | None:
    if not path.exists():
        return None
    try:
        return from_json_text(cls, path.read_text(encoding="utf-8"))
    except (OptionError, UnicodeDecodeError) as error:
        raise OptionError(
            f"{path} cannot be read", found=str(error).splitlines()[0], try_="restore the file"
        ) from error


def _outcome(job: Job | None, steps: tuple[StepRecord, ...]) -> str:
    """Return "done", or how far the run came; without a number of steps in the job it counts as done."""
    made = steps[-1].step if steps else 0
    if job is None or job.steps is None or made >= job.steps:
        return "done"
    return f"stopped after {plural(made, 'step')} of {job.steps:,}"
