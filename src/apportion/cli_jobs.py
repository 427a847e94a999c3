"""From options to what the stages take: parts, cluster, profile, limits, plan and job."""

from __future__ import annotations

import dataclasses
import difflib
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from .api import describe, plan, profile
from .cli_cache import kept_profile, profile_key
from .cli_schema import (
    CompareOptions,
    Layout,
    OnCluster,
    OnTarget,
    PlanOptions,
    Start,
    TrainOptions,
    VerifyOptions,
)
from .errors import OptionError, PlanError
from .reading.hf_files import config_file, hf_fingerprint
from .records import (
    Candidate,
    Cluster,
    DeviceType,
    Job,
    Limits,
    Plan,
    Profile,
    Strategy,
    from_json_text,
)
from .units import parse_bytes

if TYPE_CHECKING:
    from .reading import JobParts

RunOptions = TrainOptions | VerifyOptions | CompareOptions
_MESH_AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")
_VERSIONS = ("apportion", "torch", "numpy", "transformers")
DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What a plan is made of."""

    batch_size: int
    cluster: Cluster
    profile: Profile
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared(Forecast):
    """What is known before anything runs."""

    parts: JobParts


def read_parts(options: OnTarget) -> JobParts:
    """Return the job that the options name."""
    from .reading import read_target

    return read_target(options.target, overrides=options.set, seq_len=options.seq_len, seed=options.seed)


def batch_size_of(options: OnTarget, parts: JobParts) -> int:
    """Return the global batch: as asked, a one-batch job's own, or 32."""
    from .reading import num_samples

    if options.batch_size is not None:
        return options.batch_size
    if not parts.one_batch:
        return DEFAULT_BATCH_SIZE
    return num_samples(parts.example(sys.maxsize), parts.batch_dims) or DEFAULT_BATCH_SIZE


def profile_target(options: OnTarget, device_type: DeviceType) -> Profile:
    """Return the profile of a target for the global batch; that of a configuration may be a kept one."""

    def make() -> Profile:
        parts = read_parts(options)
        return profile(parts, batch_samples=batch_size_of(options, parts), device_type=device_type)

    if not options.target.startswith("hf:"):
        return make()
    file = config_file(options.target.removeprefix("hf:"))
    key = profile_key(
        hf_fingerprint(file, options.set, options.seq_len),
        batch_samples=options.batch_size or DEFAULT_BATCH_SIZE,
        device_type=device_type,
        versions=versions(),
    )
    return kept_profile(key, make)


def forecast(options: PlanOptions) -> Forecast:
    """Describe the machines and profile the target, for a plan that nothing is run with."""
    cluster = cluster_of(options)
    found = profile_target(options, cluster.device.type)
    batch_size = options.batch_size or found.batch_samples
    return Forecast(
        batch_size=batch_size, cluster=cluster, profile=found, limits=limits_of(options, batch_size)
    )


def cluster_of(options: OnCluster) -> Cluster:
    """Return the machines that the options name."""
    return describe(
        options.devices,
        intra_node=options.intra_node,
        inter_node=options.inter_node,
        oversubscription=options.oversubscription or 1.0,
    )


def limits_of(options: Layout, batch_size: int) -> Limits:
    """Return what the options fix of the layout."""
    mesh = {axis: getattr(options, axis) for axis in _MESH_AXES if getattr(options, axis) is not None}
    return Limits(
        strategy=options.strategy,
        mesh=mesh,
        zero_stage=options.zero,
        schedule=options.schedule,
        virtual_stages=options.virtual_stages,
        micro_batch_size=options.micro_batch_size,
        activation_checkpointing=options.activation_checkpointing,
        sequence_parallel=options.sequence_parallel,
        precision=options.precision,
        memory_bytes=None if options.memory_limit is None else parse_bytes(options.memory_limit),
        optimizer=options.optimizer,
        batch_size=batch_size,
    )


def prepare(options: RunOptions) -> Prepared:
    """Read the target, describe the machines and profile the model."""
    cluster = cluster_of(options)
    parts = read_parts(options)
    batch_size = batch_size_of(options, parts)
    return Prepared(
        parts=parts,
        batch_size=batch_size,
        cluster=cluster,
        profile=profile(parts, batch_samples=batch_size, device_type=cluster.device.type),
        limits=limits_of(options, batch_size),
    )


def plan_for(options: RunOptions, prepared: Prepared) -> tuple[Plan, Candidate]:
    """Return the plan with its best being what `--plan` names, and that candidate.

    Raises: OptionError for an unknown name or a plan of other devices; PlanError if nothing fits, or what
    was asked for is excluded.
    """
    name = options.plan
    if name.endswith(".json") or "/" in name:
        return _saved_plan(Path(name), prepared)
    limits = prepared.limits
    if name in {strategy.value for strategy in Strategy}:
        if limits.strategy not in (None, Strategy(name)):
            raise OptionError(f"--plan {name} contradicts --strategy {limits.strategy.value}", try_="give one")
        limits = dataclasses.replace(limits, strategy=Strategy(name))
        name = "auto"
    made = plan(prepared.profile, prepared.cluster, limits)
    if name == "auto":
        return made, _best(made, limits)
    candidate = _named(made, name)
    return dataclasses.replace(made, best=candidate), candidate


def _best(made: Plan, limits: Limits) -> Candidate:
    if made.best is not None:
        return made.best
    wanted = limits.strategy.value if limits.strategy else ""
    for excluded in made.excluded:
        if excluded.name == wanted:
            raise PlanError(
                f"{wanted} cannot be used here",
                found=excluded.reason,
                try_=excluded.try_ or made.smallest_change,
            )
    raise nothing_fits(made)


def nothing_fits(made: Plan) -> PlanError:
    """Return the error for a plan without a candidate that fits."""
    short = [excluded for excluded in made.excluded if excluded.short_by_bytes > 0]
    nearest = min(short, key=lambda excluded: excluded.short_by_bytes, default=None)
    reasons = "; ".join(f"{excluded.name}: {excluded.reason}" for excluded in made.excluded[:2])
    found = reasons
    if nearest is not None:
        found = f"{nearest.name} {nearest.reason}: {nearest.short_by_bytes:,} bytes short"
    what = f"{made.model.name} does not fit on {made.cluster.devices} x {made.cluster.kind}"
    return PlanError(what, found=found, try_=made.smallest_change)


def _named(made: Plan, name: str) -> Candidate:
    for candidate in made.candidates:
        if candidate.name == name:
            return candidate
    names = [candidate.name for candidate in made.candidates] + [strategy.value for strategy in Strategy]
    near = difflib.get_close_matches(name, names, n=1)
    raise OptionError(
        f"--plan {name}: there is no such plan",
        try_=f"did you mean '{near[0]}'?" if near else f"auto, a plan.json, or one of {', '.join(names)}",
    )


def _saved_plan(path: Path, prepared: Prepared) -> tuple[Plan, Candidate]:
    try:
        text = path.read_text()
    except OSError as error:
        raise OptionError(
            f"--plan {path} cannot be read",
            found=error.strerror or str(error),
            try_="apportion plan ... --json > plan.json",
        ) from None
    try:
        saved = from_json_text(Plan, text)
    except OptionError as error:
        raise OptionError(
            f"--plan {path} holds no plan: {error.what}", found=error.found, try_=error.try_
        ) from None
    if saved.best is None:
        raise OptionError(f"--plan {path} holds no plan that fits", found=saved.smallest_change)
    here = prepared.profile
    if saved.model.parameters != here.root.parameters:
        raise OptionError(
            f"--plan {path} was made for another model",
            found=f"{saved.model.name} of {saved.model.parameters:,} parameters, not {here.root.parameters:,}",
            try_="plan again for this target and these --set values",
        )
    if saved.cluster.devices != prepared.cluster.num_devices:
        raise OptionError(
            f"--plan {path} was made for {saved.cluster.devices} devices",
            found=f"--devices gives {prepared.cluster.num_devices}",
            try_=f"plan again, or give {saved.cluster.devices} devices",
        )
    return saved, saved.best


def job_of(options: RunOptions, prepared: Prepared, run_dir: Path) -> Job:
    """Return the resolved options of a run."""
    common = Job(
        target=options.target,
        devices=options.devices,
        plan=options.plan,
        batch_size=prepared.batch_size,
        seq_len=options.seq_len,
        seed=options.seed,
        optimizer=options.optimizer,
        run_dir=str(run_dir),
        limits=prepared.limits,
        overrides=options.set,
        versions=versions(),
        steps=options.steps,
        fingerprint=prepared.parts.fingerprint,
    )
    if not isinstance(options, TrainOptions):
        return common
    return dataclasses.replace(
        common,
        engine=options.engine,
        epochs=options.epochs,
        lr=options.lr,
        clip_norm=options.clip_norm,
        validate_every=options.validate_every,
        save_every=options.save_every,
        keep_checkpoints=options.keep_checkpoints,
        log_every=options.log_every,
        num_workers=options.num_workers,
        compile=options.compile,
        check_first_step=options.check,
        resume=options.resume,
    )


def versions() -> dict[str, str]:
    """Return the versions that a run depends on; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in _VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def with_torchrun_flags(options: RunOptions) -> RunOptions:
    """Turn torchrun's flags into ours.

    Raises: OptionError for more than one node, or a number of processes that --devices contradicts.
    """
    if options.nnodes not in (None, "1", "1:1"):
        raise OptionError(
            f"--nnodes {options.nnodes}: this version starts processes on one node",
            try_="start it on every node with torchrun -m apportion train ...; train joins the group",
        )
    count = options.nproc_per_node
    if count in (None, "auto", "gpu", "cpu"):
        return options
    if not str(count).isdigit() or count == "0":
        raise OptionError(f"--nproc-per-node {count}", try_="a number of processes, or auto")
    if options.devices not in ("local", f"local:{count}"):
        raise OptionError(
            f"--nproc-per-node {count} contradicts --devices {options.devices}", try_="give one of them"
        )
    return options.model_copy(update={"devices": f"local:{count}"})


def port_of(options: Start) -> int | None:
    """Return the port of --rdzv-endpoint.

    Raises: OptionError if it is not HOST:PORT with a host that is this one.
    """
    if options.rdzv_endpoint is None:
        return None
    host, _, port = options.rdzv_endpoint.rpartition(":")
    if not port.isdigit() or not 0 <= int(port) <= 65535:
        raise OptionError(f"--rdzv-endpoint {options.rdzv_endpoint} is not HOST:PORT", try_="localhost:29500")
    if host not in ("localhost", "127.0.0.1", "0.0.0.0", platform.node()):
        raise OptionError(
            f"--rdzv-endpoint {options.rdzv_endpoint}: this version starts processes on one node",
            found=f"this host is {platform.node()}",
            try_=f"localhost:{port}",
        )
    return int(port) or None
