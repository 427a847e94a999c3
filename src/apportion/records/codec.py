"""JSON both ways for every record; the only place that handles untyped data.

Enums travel as their values, tuples as lists, mappings as objects. Unknown and missing keys are errors that
name the nearest key.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import types
import typing
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

from ..errors import OptionError

SCHEMA = 1
T = TypeVar("T")


def to_json(record: object) -> Any:
    """Return plain lists, dicts, numbers and strings for a record (or a tuple, mapping or scalar in one)."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        return {field.name: to_json(getattr(record, field.name)) for field in dataclasses.fields(record)}
    if isinstance(record, Enum):
        return record.value
    if isinstance(record, Mapping):
        return {str(key): to_json(value) for key, value in record.items()}
    if isinstance(record, list | tuple):
        return [to_json(item) for item in record]
    if record is None or isinstance(record, bool | int | float | str):
        return record
    raise TypeError(f"{type(record).__name__} has no JSON form")


def to_json_text(record: object, *, indent: int | None = 1) -> str:
    """Return the JSON document of a record."""
    return json.dumps(to_json(record), indent=indent, ensure_ascii=False)


def from_json_text(cls: type[T], text: str) -> T:
    """Read a record of class `cls` from a JSON document.

    Raises: OptionError if the text is not JSON or does not describe such a record.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise OptionError(
            f"not a JSON document: {error}", try_=f"give a file holding a {cls.__name__}"
        ) from None
    return from_json(cls, data)


def from_json(cls: type[T], data: Any) -> T:
    """Read a record of class `cls` from plain data.

    Raises: OptionError naming the key or value that does not fit.
    """
    return typing.cast(T, _read(cls, data, cls.__name__))


def _read_record(cls: type[Any], data: Any, path: str) -> Any:
    if not isinstance(data, Mapping):
        raise OptionError(f"{path} should be an object", found=repr(data)[:80])
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in data:
        if key not in fields:
            near = difflib.get_close_matches(str(key), list(fields), n=1)
            raise OptionError(
                f"{path} has no key '{key}'",
                try_=f"did you mean '{near[0]}'?" if near else f"keys are {', '.join(fields)}",
            )
    if "schema" in fields and data.get("schema", SCHEMA) != SCHEMA:
        raise OptionError(f"{path} has schema {data['schema']}", found=f"this version reads schema {SCHEMA}")
    hints = typing.get_type_hints(cls)
    values = {name: _read(hints[name], data[name], f"{path}.{name}") for name in fields if name in data}
    try:
        return cls(**values)
    except TypeError as error:
        raise OptionError(f"{path} lacks a key", found=str(error)) from None
    except ValueError as error:
        raise OptionError(f"{path} is not valid", found=str(error)) from None


def _read_union(hint: Any, data: Any, path: str) -> Any:
    choices = typing.get_args(hint)
    if data is None and type(None) in choices:
        return None
    failures = []
    for choice in choices:
        if choice is type(None):
            continue
        try:
            return _read(choice, data, path)
        except OptionError as error:
            failures.append(error)
    raise failures[0]


def _read(hint: Any, data: Any, path: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _read_union(hint, data, path)
    if dataclasses.is_dataclass(hint):
        return _read_record(typing.cast(type[Any], hint), data, path)
    if isinstance(hint, type) and issubclass(hint, Enum):
        try:
            return hint(data)
        except ValueError:
            values = ", ".join(str(item.value) for item in hint)
            raise OptionError(f"{path} is {data!r}", try_=f"one of {values}") from None
    if origin is tuple:
        if not isinstance(data, list | tuple):
            raise OptionError(f"{path} should be a list", found=repr(data)[:80])
        args = typing.get_args(hint)
        kinds = [args[0]] * len(data) if len(args) == 2 and args[1] is Ellipsis else list(args)
        if len(kinds) != len(data):
            raise OptionError(f"{path} should have {len(kinds)} items", found=f"{len(data)}")
        return tuple(
            _read(kind, item, f"{path}[{i}]") for i, (kind, item) in enumerate(zip(kinds, data, strict=True))
        )
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(data, Mapping):
            raise OptionError(f"{path} should be an object", found=repr(data)[:80])
        value_hint = typing.get_args(hint)[1]
        return {key: _read(value_hint, value, f"{path}.{key}") for key, value in data.items()}
    return _read_scalar(hint, data, path)


def _read_scalar(hint: Any, data: Any, path: str) -> Any:
    if hint is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, hint) or (hint is int and isinstance(data, bool)):
        raise OptionError(f"{path} should be {hint.__name__}", found=repr(data)[:80])
    return data
