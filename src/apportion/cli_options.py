"""From the arguments of a command to its options: flags over a config file over defaults, by one schema."""

from __future__ import annotations

import argparse
import difflib
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from .cli_schema import Output, choices_of
from .errors import ApportionError, OptionError

O = TypeVar("O", bound=Output)  # noqa: E741 - options


class UsageError(ApportionError):
    """The command line itself is not understood."""

    exit_code = 2


class _Parser(argparse.ArgumentParser):
    """Raises instead of printing and leaving."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, try_=f"{self.prog} --help")


def parse_options(name: str, schema: type[O], arguments: Sequence[str]) -> O:
    """Return the options of the command `name`.

    Raises: UsageError (exit 2) for an unknown option or a missing value; OptionError (exit 1) for a value or
    a config key that cannot be used; both name the nearest there is.
    """
    given = parse_flags(name, schema, arguments)
    file = given.get("config")
    merged = {**read_config(schema, Path(str(file))), **given} if file else given
    if "set" in merged and file:
        merged["set"] = _merged_pairs(schema, str(file), given)
    return _validated(name, schema, merged)


def parse_flags(name: str, schema: type[Output], arguments: Sequence[str]) -> dict[str, Any]:
    """Return the flags that were given, by key, as text.

    Raises: UsageError for an unknown option, a missing value or an argument too many.
    """
    parser = _parser(name, schema)
    words = [_with_dashes(word) for word in arguments]
    known, unknown = parser.parse_known_args(words)
    if unknown:
        raise _unknown(name, schema, unknown)
    return vars(known)


def _parser(name: str, schema: type[Output]) -> _Parser:
    parser = _Parser(
        prog=f"apportion {name}", add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    short = {"quiet": ("-q",), "verbose": ("-v",)}
    for field, info in schema.model_fields.items():
        key = info.alias or field
        if key == "target":
            parser.add_argument("target", nargs="?", default=argparse.SUPPRESS)
        elif key == "set":
            parser.add_argument("--set", action="append")
        elif is_switch(info):
            parser.add_argument(*short.get(key, ()), flag_of(key), action="store_true", dest=key)
        else:
            parser.add_argument(flag_of(key), dest=key)
    return parser


def is_switch(info: FieldInfo) -> bool:
    """Say whether an option is a flag without a value."""
    return info.annotation is bool and info.default is False


def flag_of(key: str) -> str:
    """Return `--batch-size` for `batch_size`."""
    return "--" + key.replace("_", "-")


def _with_dashes(word: str) -> str:
    """Accept torchrun's spelling of flags with underscores."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def _unknown(name: str, schema: type[Output], words: Sequence[str]) -> UsageError:
    flags = [word for word in words if word.startswith("-") and len(word) > 1]
    if not flags:
        return UsageError(f"apportion {name} takes no argument '{words[0]}'", try_=f"apportion {name} --help")
    known = [flag_of(info.alias or field)[2:] for field, info in schema.model_fields.items()]
    flag = flags[0].partition("=")[0]
    near = difflib.get_close_matches(flag.lstrip("-"), [one for one in known if one != "target"], n=1)
    advice = f"did you mean --{near[0]}?" if near else f"apportion {name} --help-all lists them"
    return UsageError(f"apportion {name} has no option {flag}", try_=advice)


def read_config(schema: type[Output], file: Path) -> dict[str, Any]:
    """Return the options in a TOML or YAML file, by key.

    Raises: OptionError if it cannot be read, or has a key that is no option (naming the nearest).
    """
    data = _loaded(file)
    keys = [info.alias or field for field, info in schema.model_fields.items()]
    allowed = [key for key in keys if key not in ("config", "print_config")]
    options = {str(key).replace("-", "_"): value for key, value in data.items()}
    for key in options:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, n=1)
            raise OptionError(
                f"{file} has the unknown key '{key}'",
                try_=f"did you mean '{near[0]}'?" if near else f"keys are {', '.join(allowed)}",
            )
    return options


def _loaded(file: Path) -> Mapping[Any, Any]:
    readers: dict[str, Callable[[str], Any]] = {
        ".toml": tomllib.loads,
        ".yaml": yaml.safe_load,
        ".yml": yaml.safe_load,
    }
    reader = readers.get(file.suffix)
    if reader is None:
        raise OptionError(f"--config {file} is neither TOML nor YAML", try_="name it .toml, .yaml or .yml")
    try:
        data = reader(file.read_text())
    except OSError as error:
        raise OptionError(f"--config {file} cannot be read", found=error.strerror or str(error)) from error
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        found = " ".join(str(error).split())
        raise OptionError(f"--config {file} cannot be understood", found=found) from error
    if not isinstance(data, Mapping):
        raise OptionError(
            f"--config {file} holds no options", found=type(data).__name__, try_="KEY: VALUE lines"
        )
    return data


def _merged_pairs(schema: type[Output], file: str, given: Mapping[str, Any]) -> Any:
    """Join the `set` table of the file with the pairs of the command line, which win."""
    base = read_config(schema, Path(file)).get("set", {})
    pairs = given.get("set", [])
    if not isinstance(base, Mapping):
        raise OptionError(f"'set' in {file} should be a table of names and values", found=repr(base))
    return [f"{name}={value}" for name, value in base.items()] + list(pairs)


def _validated(name: str, schema: type[O], values: Mapping[str, Any]) -> O:
    try:
        return schema.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = str(first["loc"][0]) if first["loc"] else ""
        raise _bad_value(name, schema, key, first["msg"], values.get(key)) from None


def _bad_value(name: str, schema: type[Output], key: str, message: str, value: object) -> OptionError:
    info = next(one for field, one in schema.model_fields.items() if key in (field, one.alias))
    choices = choices_of(info.annotation)
    if choices:
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        return OptionError(f"{flag_of(key)} cannot be '{value}'", try_=f"{hint}choices: {', '.join(choices)}")
    wanted = message.removeprefix("Value error, ").replace("Input should be", "it should be")
    return OptionError(f"{flag_of(key)} cannot be {value!r}", found=wanted, try_=info.description or "")


def resolved(options: Output) -> dict[str, Any]:
    """Return the options by key, as a config file would hold them; what is not given is left out."""
    data = options.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {key: value for key, value in data.items() if key not in ("config", "print_config")}
