"""The six verbs, in the order of the flow: describe, profile, plan, apply, run, report.

What a verb needs is imported when it is called, so that a plan from a kept profile waits for no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import OptionError, TargetError
from .records import (
    Cluster,
    DeviceType,
    Limits,
    Measured,
    Parity,
    Plan,
    Profile,
    Report,
    Strategy,
    Task,
    TrainResult,
    from_json_text,
    to_json_text,
)

if TYPE_CHECKING:
    from .launching import Tick
    from .reading import JobParts

T = TypeVar("T", TrainResult, Parity, Measured)
# One process drives all devices in these; every other layout has one process per device.
ONE_PROCESS = (Strategy.SINGLE, Strategy.DP, Strategy.NAIVE)


def describe(
    devices: str = "local",
    *,
    intra_node: str | None = None,
    inter_node: str | None = None,
    oversubscription: float = 1.0,
) -> Cluster:
    """Return the machines that `devices` names: `local`, `local:4`, `8xH100` or a `cluster.toml`."""
    from . import describing

    return describing.describe(
        devices, intra_node=intra_node, inter_node=inter_node, oversubscription=oversubscription
    )


def profile(
    target: str | JobParts,
    *,
    batch_samples: int = 32,
    device_type: DeviceType = DeviceType.CUDA,
    overrides: Mapping[str, str] | None = None,
    seq_len: int | None = None,
) -> Profile:
    """Return what the model of a target costs, found without allocating its weights where that is possible.

    Raises: TargetError that says which function of the job is to be mended.
    """
    from . import profiling, reading

    parts = target
    if isinstance(parts, str):
        parts = reading.read_target(parts, overrides=overrides, seq_len=seq_len)
    try:
        return profiling.profile_parts(parts, batch_samples=batch_samples, device_type=device_type)
    except TargetError:
        reading.recheck(parts)  # which of the user's functions it is, if the model is small enough to run
        raise


def plan(profile: Profile, cluster: Cluster, limits: Limits | None = None) -> Plan:
    """Return the candidates, the pick and why; what `limits` leaves open is searched."""
    from . import planning

    return planning.make_plan(profile, cluster, limits or Limits())


def apply(model: Any, *arguments: Any, **options: Any) -> Any:
    """Return a session that trains `model` by a plan, in a process group that is already there.

    The arguments are those of `parallelize`.
    """
    from .running.parallel import parallelize

    return parallelize(model, *arguments, **options)


def run(
    task: Task,
    answer: type[T],
    *,
    env: Mapping[str, str] | None = None,
    max_restarts: int = 0,
    on_tick: Callable[[Tick], None] | None = None,
) -> T:
    """Start the ranks of a task on this host, wait for them, and return what rank 0 answers.

    The task is kept as `task.json` in the job's run directory, and the ranks' output under `logs/`.

    Raises: OptionError if the directory cannot be written; what a rank raised; RankError if one died.
    """
    from .launching import launch

    run_dir = Path(task.job.run_dir)
    file = run_dir / "task.json"
    result = Path(task.result)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file.write_text(to_json_text(task))
        result.unlink(missing_ok=True)
    except OSError as error:
        raise OptionError(
            f"cannot write to the run directory {run_dir}",
            found=str(error),
            try_="choose another with --run-dir",
        ) from error
    launch(
        file,
        num_ranks=num_processes(task),
        log_dir=run_dir / "logs",
        env=env or {},
        max_restarts=max_restarts,
        on_tick=on_tick,
    )
    return from_json_text(answer, result.read_text())


def num_processes(task: Task) -> int:
    """Return the processes that a task runs in."""
    return 1 if task.candidate.strategy in ONE_PROCESS else task.candidate.mesh.num_ranks


def report(run_dir: str | Path) -> Report:
    """Write the page of a run, `report.html` in its directory, and return what it says."""
    from .reporting.html import write_report
    from .reporting.runs import read_run

    write_report(Path(run_dir))
    return read_run(Path(run_dir))
