"""The help texts: one screen for each command, and the full list behind --help-all."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic.fields import FieldInfo

from .cli_options import flag_of, is_switch
from .cli_schema import Output, choices_of

WIDTH = 100
# Stands for a space that no line may be broken at, while wrapping.
_KEPT = "\0"
EXIT_CODES = (
    "exit codes: 0 done, 1 bad target, data or value, 2 usage, 3 nothing fits or refused, "
    "4 parity failed, 5 a rank hung or died, 6 stopped after saving"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command: `run` is `module:function`, imported when it is called."""

    name: str
    summary: str
    options: type[Output]
    run: str
    examples: tuple[str, ...]


def overview(commands: Sequence[Command]) -> str:
    """Return the text of `apportion --help`."""
    rows = [f"  {command.name:<10} {command.summary}" for command in commands]
    return "\n".join(
        [
            "Apportion: plan, run and prove parallel PyTorch training.",
            "",
            "usage: apportion COMMAND [TARGET] [options]",
            "",
            *rows,
            "",
            "  TARGET is a job file (file.py, file.py:function, package.module) or hf:PATH of a config.json.",
            "",
            "examples:",
            "  apportion plan examples/text.py --devices 8xH100 --batch-size 256",
            "  apportion train examples/text.py --devices local:2 --steps 200",
            "",
            "apportion COMMAND --help shows a command's options; --version the version.",
            *textwrap.wrap(EXIT_CODES, WIDTH),
        ]
    )


def command_help(command: Command, *, full: bool) -> str:
    """Return the text of `apportion COMMAND --help`, or with `full` that of --help-all."""
    fields = [(info.alias or field, info) for field, info in command.options.model_fields.items()]
    takes_target = any(key == "target" for key, _ in fields)
    metavar = next((_extra(info, "metavar") for key, info in fields if key == "target"), "")
    usage = f"usage: apportion {command.name} {str(metavar) + ' ' if takes_target else ''}[options]"
    shown = [(key, info) for key, info in fields if full or _extra(info, "main")]
    rest = [(key, info) for key, info in fields if not full and not _extra(info, "main")]
    lines = [usage, "", *textwrap.wrap(command.summary[0].upper() + command.summary[1:] + ".", WIDTH), ""]
    lines += [line for key, info in shown for line in _line(key, info)]
    if rest:
        compact = ", ".join(_label(key, info).replace(" ", _KEPT) for key, info in rest)
        text = f"also (--help-all explains them): {compact}"
        wrapped = textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
        lines += ["", *(line.replace(_KEPT, " ") for line in wrapped)]
    lines += ["", "examples:", *(f"  {example}" for example in command.examples)]
    return "\n".join(lines)


def _line(key: str, info: FieldInfo) -> list[str]:
    label = _label(key, info)
    text = info.description or ""
    choices = choices_of(info.annotation)
    if choices:
        text = f"{text}: {', '.join(choices)}"
    default = info.default
    if default not in (None, False, True, "", {}) and "[" not in text:
        text = f"{text} [{default}]"
    return textwrap.wrap(text, WIDTH, initial_indent=f"  {label:<26} ", subsequent_indent=" " * 29)


def _label(key: str, info: FieldInfo) -> str:
    if key == "target":
        return str(_extra(info, "metavar"))
    flag = flag_of(key)
    if is_switch(info):
        return flag
    metavar = str(_extra(info, "metavar")) or key.split("_")[-1].upper()
    return f"{flag} {metavar}"


def _extra(info: FieldInfo, key: str) -> Any:
    extra = info.json_schema_extra
    return extra.get(key, "") if isinstance(extra, dict) else ""
