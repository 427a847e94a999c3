"""`train`, `verify` and `compare`: make a task, start its ranks, read what rank 0 answers."""

from __future__ import annotations

import dataclasses
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from .api import num_processes, run
from .cli_answer import Answer
from .cli_jobs import (
    Prepared,
    RunOptions,
    job_of,
    plan_for,
    port_of,
    prepare,
    with_torchrun_flags,
)
from .cli_schema import CompareOptions, Start, TrainOptions, VerifyOptions
from .cli_watch import TerminalWatch, has_terminal
from .errors import ApportionError, OptionError, ParityError, PlanError, RefusedError, StoppedError
from .launching import Tick, joined
from .records import (
    Candidate,
    Command,
    CompareRow,
    Comparison,
    Measured,
    Parity,
    ParityStatus,
    Plan,
    Strategy,
    Task,
    TrainResult,
    to_json,
)
from .reporting import compare_table, parity_table, placement_picture, plan_table

T = TypeVar("T", TrainResult, Parity, Measured)


def train(options: TrainOptions) -> Answer:
    """Train the target and answer with how it ended."""
    asked = with_torchrun_flags(options)
    assert isinstance(asked, TrainOptions)
    group = joined(os.environ)
    if group is not None and not asked.dry_run:
        return _train_joined(asked)
    task, prepared = _training_task(asked)
    if asked.dry_run:
        return _dry_run(task, prepared)
    run_dir = Path(task.job.run_dir)
    task = dataclasses.replace(task, result=str(run_dir / "result.json"))
    result = _launched(task, TrainResult, options=asked)
    return _trained(result, prepared.cluster.warnings)


def _training_task(options: TrainOptions) -> tuple[Task, Prepared]:
    prepared = prepare(options)
    if prepared.parts.data is None:
        raise OptionError(
            f"{options.target} has no data to train on",
            try_="add data(split) to a job file; inspect, plan, verify and compare take it as it is",
        )
    _require_local(options.devices)
    plan, candidate = plan_for(options, prepared)
    _require_samples(prepared, candidate)
    run_dir = Path(options.run_dir or Path("runs") / prepared.parts.name.replace(":", "-"))
    job = job_of(options, prepared, run_dir)
    task = Task(
        command=Command.TRAIN,
        job=job,
        candidate=candidate,
        plan=plan,
        device_type=prepared.cluster.device.type,
    )
    return task, prepared


def _require_local(devices: str) -> None:
    """Refuse to start processes for machines that are only described."""
    if devices == "local" or devices.startswith("local:") or Path(devices).suffix == ".toml":
        return
    raise OptionError(
        f"--devices {devices} describes machines that are not here",
        try_="--devices local to run here, or apportion plan for a forecast",
    )


def _require_samples(prepared: Prepared, candidate: Candidate) -> None:
    ranks = candidate.mesh.num_data_ranks
    if prepared.batch_size < ranks:
        raise OptionError(
            f"a batch of {prepared.batch_size} is smaller than its {ranks} data-parallel ranks",
            found=f"plan {candidate.name}",
            try_=f"--batch-size {ranks} or more, or fewer devices",
        )


def _train_joined(options: TrainOptions) -> Answer:
    """Train in this process of a group that is already there; rank 0 plans and answers."""
    from .rank import run_joined

    group = joined(os.environ)
    assert group is not None
    local = options.model_copy(update={"devices": f"local:{group.world_size}"})

    def task() -> Task:
        return _training_task(local if options.devices == "local" else options)[0]

    result = run_joined(group, task)
    assert isinstance(result, TrainResult)
    answer = _trained(result, ())
    return answer if group.rank == 0 else dataclasses.replace(answer, document=None, views=())


def _trained(result: TrainResult, notes: tuple[str, ...]) -> Answer:
    lines = [f"step {result.step}, loss {result.loss:.6g}, {result.seconds:.1f} s"]
    lines += [f"checkpoint {result.checkpoint}"] if result.checkpoint else []
    lines += [f"report {result.report}"] if result.report else []
    error = None
    if result.stopped:
        error = StoppedError(
            f"stopped on request after step {result.step}",
            found=f"saved in {result.checkpoint}" if result.checkpoint else "",
            try_="run the same command again to go on from there",
        )
    return Answer(document=result, views=("\n".join(lines),), notes=notes, error=error)


def _dry_run(task: Task, prepared: Prepared) -> Answer:
    processes = num_processes(task)
    line = (
        f"would start {processes} process{'es' * (processes > 1)} in {task.job.run_dir}: {task.candidate.name}"
    )
    views: tuple[object, ...] = (plan_table(task.plan),) if task.plan else ()
    views += (placement_picture(task.candidate), line)
    document = {"processes": processes, "job": to_json(task.job), "plan": to_json(task.plan)}
    return Answer(document=document, views=views, notes=prepared.cluster.warnings)


def verify(options: VerifyOptions) -> Answer:
    """Compare a plan with one device and answer with the parity."""
    asked = with_torchrun_flags(options)
    assert isinstance(asked, VerifyOptions)
    _require_local(asked.devices)
    prepared = prepare(asked)
    try:
        _require_batch(asked, prepared)
        plan, candidate = plan_for(asked, prepared)
    except PlanError as error:
        return _verified(_refused(error, asked, prepared), prepared)
    parity = _measure(asked, prepared, Command.VERIFY, (plan, candidate), Parity)
    return _verified(parity, prepared)


def _require_batch(options: RunOptions, prepared: Prepared) -> None:
    """Refuse a batch that a one-batch job cannot fill."""
    parts = prepared.parts
    if options.batch_size is None or not parts.one_batch:
        return
    own = prepared.profile.batch_samples
    if options.batch_size > own:
        raise OptionError(
            f"--batch-size {options.batch_size} is more than {options.target} brings",
            found=f"{own} samples",
            try_=f"--batch-size {own}, or leave it out",
        )


def _refused(error: PlanError, options: RunOptions, prepared: Prepared) -> Parity:
    strategy = options.strategy.value if options.strategy else options.plan
    reason = "; ".join(text for text in (error.what, error.found, error.try_) if text)
    return Parity(
        status=ParityStatus.REFUSED,
        reason=reason,
        strategy=strategy,
        world_size=prepared.cluster.num_devices,
    )


def _verified(parity: Parity, prepared: Prepared) -> Answer:
    error: ApportionError | None = None
    if parity.status is ParityStatus.REFUSED:
        error = RefusedError(f"{parity.strategy} is refused for {prepared.parts.name}", found=parity.reason)
    elif parity.status is ParityStatus.WRONG:
        error = ParityError(
            f"{parity.strategy} does not give the answer of one device",
            found=f"{parity.worst.name} on rank {parity.worst.rank}: {parity.reason or parity.relative_error}",
            try_="another --strategy; a difference under every strategy points at the model itself",
        )
    return Answer(
        document=parity, views=(parity_table([parity]),), notes=prepared.cluster.warnings, error=error
    )


def compare(options: CompareOptions) -> Answer:
    """Run the best candidate of every strategy for a few steps and answer with predicted beside measured."""
    asked = with_torchrun_flags(options)
    assert isinstance(asked, CompareOptions)
    _require_local(asked.devices)
    prepared = prepare(asked)
    _require_batch(asked, prepared)
    plan, pick = plan_for(asked, prepared)
    rows = [_row(asked, prepared, (plan, candidate)) for candidate in _one_per_strategy(plan, pick)]
    rows += [CompareRow(strategy=item.name, reason=item.reason) for item in plan.excluded]
    comparison = compared(tuple(rows), pick.strategy.value)
    return Answer(document=comparison, views=(compare_table(comparison),), notes=prepared.cluster.warnings)


def _one_per_strategy(plan: Plan, pick: Candidate) -> tuple[Candidate, ...]:
    """Return the pick and the first fitting candidate of every other strategy, in the plan's order."""
    chosen: dict[Strategy, Candidate] = {pick.strategy: pick}
    for candidate in plan.candidates:
        if candidate.fits:
            chosen.setdefault(candidate.strategy, candidate)
    return tuple(chosen.values())


def _row(options: CompareOptions, prepared: Prepared, planned: tuple[Plan, Candidate]) -> CompareRow:
    candidate = planned[1]
    estimate = candidate.estimate
    row = CompareRow(
        strategy=candidate.strategy.value,
        predicted_step_seconds=estimate.step_seconds,
        predicted_peak_bytes=estimate.memory_bytes.peak,
    )
    try:
        measured = _measure(options, prepared, Command.COMPARE, planned, Measured)
    except StoppedError:
        raise
    except ApportionError as error:
        return dataclasses.replace(row, reason=": ".join(text for text in (error.what, error.found) if text))
    return dataclasses.replace(
        row,
        measured_step_seconds=measured.step_seconds,
        measured_peak_bytes=measured.peak_bytes,
        loss=measured.loss,
    )


def compared(rows: tuple[CompareRow, ...], pick: str) -> Comparison:
    """Return the comparison: the fastest measured, and how much longer a step of the pick takes."""
    ran = {row.strategy: row.measured_step_seconds for row in rows if not row.reason}
    best = min(ran, key=lambda name: ran[name], default="")
    regret = ran[pick] / ran[best] - 1 if pick in ran else float("nan")
    return Comparison(rows=rows, pick=pick, best=best, regret=regret)


def _measure(
    options: RunOptions, prepared: Prepared, command: Command, planned: tuple[Plan, Candidate], answer: type[T]
) -> T:
    """Do a short command in a directory of its own, which stays only if it fails (it holds the logs)."""
    plan, candidate = planned
    _require_samples(prepared, candidate)
    run_dir = Path(tempfile.mkdtemp(prefix=f"apportion-{command.value}-"))
    task = Task(
        command=command,
        job=job_of(options, prepared, run_dir),
        candidate=candidate,
        plan=plan,
        result=str(run_dir / "result.json"),
        steps=options.steps or 1,
        device_type=prepared.cluster.device.type,
    )
    result = _launched(task, answer, options=options)
    shutil.rmtree(run_dir)
    return result


def _launched(task: Task, answer: type[T], *, options: RunOptions) -> T:
    env, restarts = _rank_env(options), options.max_restarts
    if _is_silent(task.command, options):
        return run(task, answer, env=env, max_restarts=restarts, on_tick=_hear_nothing)
    if task.command is not Command.TRAIN or not has_terminal():
        return run(task, answer, env=env, max_restarts=restarts)
    with TerminalWatch(task.job) as watch:
        return run(task, answer, env=env, max_restarts=restarts, on_tick=watch)


def _is_silent(command: Command, options: RunOptions) -> bool:
    """Say whether the output of rank 0 is left in its log file."""
    return options.quiet or (command is not Command.TRAIN and not options.verbose)


def _hear_nothing(tick: Tick) -> None:
    """Leave the output of rank 0 in its log file."""


def _rank_env(options: Start) -> Mapping[str, str]:
    port = port_of(options)
    env = {} if port is None else {"APPORTION_PORT": str(port)}
    return env if options.timeout is None else {**env, "APPORTION_STEP_TIMEOUT": str(options.timeout)}
