"""The command line: parse, call one function, print what it answers."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import logging
import math
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

from . import __version__
from .cli_answer import Answer
from .cli_help import Command, command_help, overview
from .cli_options import UsageError, parse_options, resolved
from .cli_schema import (
    CalibrateOptions,
    CompareOptions,
    Configured,
    DoctorOptions,
    InspectOptions,
    Output,
    PlanOptions,
    ReportOptions,
    TrainOptions,
    VerifyOptions,
)
from .errors import ApportionError
from .records import to_json

# As shells report a command that Ctrl-C ended (128 + SIGINT).
INTERRUPTED: Final = 130

COMMANDS: Final = (
    Command(
        name="inspect",
        summary="the components of a model: parameters, FLOPs, activations, ties",
        options=InspectOptions,
        run="cli_plan:inspect",
        examples=(
            "apportion inspect examples/text.py",
            "apportion inspect hf:gpt2/config.json --seq-len 1024 --set n_layer=48",
        ),
    ),
    Command(
        name="plan",
        summary="how to split the work, what it should cost, and why",
        options=PlanOptions,
        run="cli_plan:plan",
        examples=(
            "apportion plan examples/text.py --devices 8xH100 --batch-size 256",
            "apportion plan hf:llama/ --devices 16x8xA100-80GB --seq-len 4096 --strategy fsdp --json",
        ),
    ),
    Command(
        name="train",
        summary="run the job on the devices here, or in the group that torchrun, Slurm or MPI started",
        options=TrainOptions,
        run="cli_run:train",
        examples=(
            "apportion train examples/text.py --devices local:2 --steps 200",
            "torchrun --nproc-per-node 2 -m apportion train examples/text.py --plan fsdp",
        ),
    ),
    Command(
        name="compare",
        summary="run every feasible strategy a few steps: predicted beside measured",
        options=CompareOptions,
        run="cli_run:compare",
        examples=("apportion compare examples/digits.py --devices local:2",),
    ),
    Command(
        name="verify",
        summary="compare a plan with one device: loss, gradients, weights, buffers",
        options=VerifyOptions,
        run="cli_run:verify",
        examples=("apportion verify examples/text.py --strategy ddp --devices local:2 --steps 3 --json",),
    ),
    Command(
        name="report",
        summary="one page about a run",
        options=ReportOptions,
        run="cli_machine:report",
        examples=("apportion report runs/text",),
    ),
    Command(
        name="calibrate",
        summary="measure the devices and links here for better plans",
        options=CalibrateOptions,
        run="cli_machine:calibrate",
        examples=("apportion calibrate", "apportion plan examples/text.py --devices cluster.toml"),
    ),
    Command(
        name="doctor",
        summary="what is wrong with this machine for this work, and the fix",
        options=DoctorOptions,
        run="cli_machine:doctor",
        examples=("apportion doctor", "apportion doctor --port 29500 --json"),
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code; the entry point of `apportion` and `python -m apportion`."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    state = _State(as_json="--json" in words, verbose="-v" in words or "--verbose" in words)
    try:
        return _run(words, state)
    except ApportionError as error:
        return state.fail(error)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Who read stdout has gone; what is left in the buffer must not raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:  # ours to mend: the traceback is what a report needs
        traceback.print_exc()
        message = " ".join(str(error).split())
        bug = ApportionError(
            "this is a bug in Apportion",
            found=f"{type(error).__name__}: {message}",
            try_="report it with the above",
        )
        return state.fail(bug)


class _State:
    """How this command line wants to be answered."""

    def __init__(self, *, as_json: bool, verbose: bool) -> None:
        self.as_json = as_json
        self.verbose = verbose

    def fail(self, error: ApportionError, *, document: bool = True) -> int:
        """Print an error in its three lines and return its exit code."""
        print(f"error: {error}", file=sys.stderr)
        if self.verbose and error.__traceback__ is not None:
            traceback.print_exception(error, file=sys.stderr)
        if self.as_json and document:
            lines = {"what": error.what, "found": error.found, "try": error.try_, "exit_code": error.exit_code}
            print(json.dumps({"error": lines}, indent=1, ensure_ascii=False))
        return error.exit_code


def _run(words: list[str], state: _State) -> int:
    if not words or (words[0] in ("-h", "--help", "help") and len(words) == 1):
        print(overview(COMMANDS), file=sys.stdout if words else sys.stderr)
        return 0 if words else UsageError.exit_code
    if words[0] in ("--version", "-V"):
        print(f"apportion {__version__}")
        return 0
    command, rest = _command(words)
    if {"-h", "--help", "--help-all"} & set(rest):
        print(command_help(command, full="--help-all" in rest))
        return 0
    options = parse_options(command.name, command.options, rest)
    _set_up(options)
    if isinstance(options, Configured) and options.print_config:
        print(json.dumps(resolved(options), indent=1, ensure_ascii=False))
        return 0
    _require_target(command, options)
    with contextlib.redirect_stdout(sys.stderr) if options.json_ else contextlib.nullcontext():
        answer = _function(command)(options)
    return _show(answer, options, state)


def _command(words: list[str]) -> tuple[Command, list[str]]:
    """Return the command and its arguments; `-q`, `-v` and `--json` may come before it."""
    name = next((word for word in words if not word.startswith("-")), "")
    found = next((command for command in COMMANDS if command.name == name), None)
    if found is None:
        names = [command.name for command in COMMANDS]
        near = difflib.get_close_matches(name, names, n=1)
        raise UsageError(
            f"there is no command '{name}'" if name else f"there is no command in: {' '.join(words)}",
            try_=f"did you mean '{near[0]}'?" if near else f"commands: {', '.join(names)}",
        )
    rest = list(words)
    rest.remove(name)
    return found, rest


def _require_target(command: Command, options: Output) -> None:
    if getattr(options, "target", None) == "":
        what = "the directory of a run" if command.name == "report" else "a TARGET"
        raise UsageError(f"apportion {command.name} needs {what}", found="none given", try_=command.examples[0])


def _set_up(options: Output) -> None:
    """Send the libraries' log to stderr, as much of it as was asked for."""
    level = logging.ERROR if options.quiet else logging.INFO if options.verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "info" if options.verbose else "error")


def _function(command: Command) -> Callable[[Output], Answer]:
    """Import the command's module only now: `apportion --help` must not wait for torch."""
    module, _, name = command.run.partition(":")
    return cast(Callable[[Output], Answer], getattr(importlib.import_module(f"apportion.{module}"), name))


def _show(answer: Answer, options: Output, state: _State) -> int:
    if answer.error is None and not options.quiet:  # the lines of an error stand alone
        for text in answer.notes:
            print(text, file=sys.stderr)
    if options.json_ and answer.document is not None:
        print(json.dumps(_finite(to_json(answer.document)), indent=1, ensure_ascii=False))
    elif answer.views and not options.quiet:
        from rich.console import Console

        console = Console(highlight=False, soft_wrap=False)
        for i, view in enumerate(answer.views):
            if i:
                console.print()
            if isinstance(view, str):
                print(view)
            else:
                console.print(view)
    sys.stdout.flush()
    return state.fail(answer.error, document=False) if answer.error is not None else 0


def _finite(data: Any) -> Any:
    """Replace what JSON has no number for (nan, inf) by null."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    return [_finite(value) for value in data] if isinstance(data, list) else data
