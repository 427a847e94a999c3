"""Every option once: its name, type, default and one line of help. Flags and config files are read with it.

A flag `--batch-size` is the key `batch_size` of a config file. None means "not given": searched by the planner
or filled in from the job.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from .errors import OptionError
from .records import Checkpointing, Precision, Schedule, Strategy
from .units import parse_bandwidth, parse_bytes


def _option(default: Any, text: str, *, metavar: str = "", main: bool = False, **bounds: Any) -> Any:
    """Return a field; `main` ones have a line of their own in --help."""
    extra: dict[str, Any] = {"metavar": metavar, "main": main}
    return Field(default, description=text, json_schema_extra=extra, **bounds)


def _checked_size(text: str | None) -> str | None:
    return _checked(parse_bytes, text)


def _checked_rate(text: str | None) -> str | None:
    return _checked(parse_bandwidth, text)


def _checked(parse: Any, text: str | None) -> str | None:
    if text is not None:
        try:
            parse(text)
        except OptionError as error:
            raise ValueError(f"{error.what}; {error.try_}") from None
    return text


def _pairs(value: object) -> object:
    """Turn the `name=value` strings of the command line into the mapping that a config file holds."""
    if isinstance(value, list | tuple):
        bad = [pair for pair in value if "=" not in str(pair)]
        if bad:
            raise ValueError(f"'{bad[0]}' is not NAME=VALUE")
        return dict(str(pair).split("=", 1) for pair in value)
    return {name: str(one) for name, one in value.items()} if isinstance(value, dict) else value


def _auto(value: object) -> object:
    return None if value == "auto" else value


def _on_off(value: object) -> object:
    return {"on": True, "off": False}.get(value, value) if isinstance(value, str) else value


Size = Annotated[str | None, AfterValidator(_checked_size)]
Rate = Annotated[str | None, AfterValidator(_checked_rate)]
OnOff = Annotated[bool, BeforeValidator(_on_off)]
Degree = Annotated[int | None, Field(ge=1)]


class _Group(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Output(_Group):
    """What every command has."""

    json_: bool = Field(
        False,
        alias="json",
        description="one JSON document on stdout, everything else on stderr",
        json_schema_extra={"main": True},
    )
    quiet: bool = _option(False, "only errors (-q)")
    verbose: bool = _option(False, "more about what is done, and tracebacks (-v)")


class Configured(Output):
    """Commands that take a config file."""

    config: str | None = _option(None, "options from a TOML or YAML file; flags win", metavar="FILE", main=True)
    print_config: bool = _option(False, "print the resolved options and stop")


class OnTarget(_Group):
    """What to work on."""

    target: str = _option(
        "", "file.py, file.py:function, package.module or hf:PATH", metavar="TARGET", main=True
    )
    set: Annotated[dict[str, str], BeforeValidator(_pairs)] = _option(
        {},
        "a constant of the job file or a value of the configuration; repeatable",
        metavar="NAME=VALUE",
        main=True,
    )
    batch_size: Degree = _option(
        None, "samples of one step over all ranks [32; a one-batch job's own]", metavar="N", main=True
    )
    seq_len: Degree = _option(None, "tokens per sample, for hf: targets", metavar="N", main=True)
    seed: int = _option(0, "seed of weights, order and dropout", metavar="N", ge=0)


class OnCluster(_Group):
    """What to work on it with."""

    devices: str = _option(
        "local",
        "local, local:4, 8xH100, 16x8xA100-80GB, aws:p5.48xlarge*4 or cluster.toml",
        metavar="SPEC",
        main=True,
    )
    intra_node: Rate = _option(None, "rate of the links inside a node", metavar="900GB/s")
    inter_node: Rate = _option(None, "rate of the links between nodes", metavar="400Gb/s")
    oversubscription: float | None = _option(None, "of the network between nodes", metavar="X", ge=1)


class Layout(_Group):
    """What is fixed; the rest is searched."""

    strategy: Annotated[Strategy | None, BeforeValidator(_auto)] = _option(
        None, "the way of splitting [auto: the planner's pick]", main=True
    )
    dp_replicate: Degree = _option(None, "replicas", metavar="N")
    dp_shard: Degree = _option(None, "ranks that one replica is sharded over", metavar="N")
    tp: Degree = _option(None, "tensor-parallel ranks", metavar="N")
    pp: Degree = _option(None, "pipeline stages", metavar="N")
    cp: Degree = _option(None, "context-parallel ranks", metavar="N")
    ep: Degree = _option(None, "expert-parallel ranks", metavar="N")
    virtual_stages: Degree = _option(None, "pipeline stages per rank", metavar="N")
    zero: int | None = _option(None, "ZeRO stage", metavar="0..3", ge=0, le=3)
    schedule: Schedule | None = _option(None, "order of a pipeline's micro-batches")
    micro_batch_size: Degree = _option(None, "samples per rank and forward pass", metavar="N")
    activation_checkpointing: Checkpointing | None = _option(None, "what is recomputed in backward")
    sequence_parallel: Annotated[bool | None, BeforeValidator(_on_off)] = _option(
        None, "with tensor parallel", metavar="on|off"
    )
    precision: Precision | None = _option(None, "arithmetic of forward and backward")
    optimizer: str = _option("adamw", "optimizer where the job has none", metavar="NAME")
    memory_limit: Size = _option(None, "usable memory per device", metavar="SIZE")


class Start(_Group):
    """How processes are started; torchrun's flags among them."""

    plan: str = _option(
        "auto", "auto, a candidate's name, a strategy or a plan.json", metavar="PLAN", main=True
    )
    nproc_per_node: str | None = _option(None, "as torchrun; the same as --devices local:N", metavar="N")
    nnodes: str | None = _option(None, "as torchrun; 1 in this version", metavar="N")
    rdzv_endpoint: str | None = _option(None, "as torchrun; where the ranks meet", metavar="HOST:PORT")
    max_restarts: int = _option(0, "as torchrun; restarts after a rank failed", metavar="N", ge=0)
    timeout: float | None = _option(
        None, "how long a rank may take for one step [1800]", metavar="SECONDS", gt=0
    )


class Training(_Group):
    """How far, how often, where to."""

    steps: int | None = _option(None, "optimizer steps; wins over --epochs", metavar="N", main=True, ge=1)
    epochs: int = _option(1, "passes over the data", metavar="N", main=True, ge=1)
    run_dir: str | None = _option(None, "where the run is kept [runs/NAME]", metavar="DIR", main=True)
    resume: OnOff = _option(True, "go on from the last checkpoint in the run directory [on]", metavar="on|off")
    lr: float | None = _option(None, "learning rate where the job has no optimizer", metavar="X", gt=0)
    clip_norm: float | None = _option(None, "clip the global gradient norm", metavar="X", gt=0)
    validate_every: int = _option(0, "steps between validations", metavar="N", ge=0)
    save_every: int = _option(0, "steps between checkpoints", metavar="N", ge=0)
    keep_checkpoints: int = _option(2, "how many to keep", metavar="N", ge=1)
    log_every: int = _option(10, "steps between log lines", metavar="N", ge=1)
    num_workers: int = _option(0, "loader processes per rank", metavar="N", ge=0)
    compile: bool = _option(False, "torch.compile the model")
    check: OnOff = _option(True, "check the first step against one device [on]", metavar="on|off")
    engine: Literal["local"] = _option("local", "what starts the processes")
    dry_run: bool = _option(False, "show what would be done and stop", main=True)


# Fields come out in the order of the bases from last to first: the target first, the output last.
class InspectOptions(Configured, OnTarget):
    """The options of `apportion inspect`."""


class PlanOptions(Configured, Layout, OnCluster, OnTarget):
    """The options of `apportion plan`."""


class TrainOptions(Configured, Start, Layout, OnCluster, Training, OnTarget):
    """The options of `apportion train`."""


class VerifyOptions(Configured, Start, Layout, OnCluster, OnTarget):
    """The options of `apportion verify`."""

    steps: int = _option(3, "optimizer steps to compare", metavar="N", main=True, ge=1)


class CompareOptions(Configured, Start, Layout, OnCluster, OnTarget):
    """The options of `apportion compare`."""

    steps: int = _option(10, "steps of each strategy", metavar="N", main=True, ge=2)


class ReportOptions(Output):
    """The options of `apportion report`."""

    target: str = _option("", "the directory of a run, such as runs/text", metavar="RUN_DIR", main=True)
    output: str | None = _option(None, "the page to write [RUN_DIR/report.html]", metavar="FILE", main=True)


class CalibrateOptions(Output):
    """The options of `apportion calibrate`."""

    output: str = _option("cluster.toml", "the file to write", metavar="FILE", main=True)


class DoctorOptions(Output):
    """The options of `apportion doctor`."""

    port: int | None = _option(
        None, "also check that this port is free", metavar="N", main=True, ge=1, le=65535
    )
    run_dir: str = _option("runs", "where runs are kept", metavar="DIR", main=True)


def choices_of(annotation: Any) -> tuple[str, ...]:
    """Return the values of an enum or literal in a field's type, or nothing."""
    stack, found = [annotation], []
    while stack:
        one = stack.pop(0)
        if isinstance(one, type) and issubclass(one, Enum):
            found += [str(item.value) for item in one]
        elif isinstance(one, str):
            found.append(one)
        else:
            stack += list(getattr(one, "__args__", ()))
    return tuple(found)
