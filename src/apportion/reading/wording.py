"""Words for errors: the nearest name, where user code failed, what a batch looks like."""

from __future__ import annotations

import dataclasses
import difflib
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

_SHOWN = 6


def nearest(name: str, names: Iterable[str], *, kind: str = "names") -> str:
    """Return the advice for an unknown name: the nearest one, or the list of those there are."""
    known = sorted(names)
    near = difflib.get_close_matches(name, known, n=1)
    if not near:
        near = [one for one in known if one.lower() == name.lower()]
    if near:
        return f"did you mean '{near[0]}'?"
    if not known:
        return f"there are no {kind}"
    more = ", ..." if len(known) > 12 else ""
    return f"{kind}: {', '.join(known[:12])}{more}"


def last_line(error: BaseException) -> str:
    """Return `ValueError: message (file.py:12)` for an error of the user's code.

    The place is the innermost frame outside installed packages; there may be none.
    """
    text = "".join(traceback.format_exception_only(error)).strip().splitlines()
    message = text[-1] if text else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{message} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_installed(frame.filename)]
    return f"{message} ({own[-1].filename}:{own[-1].lineno})" if own else message


def _is_installed(filename: str) -> bool:
    package = str(Path(__file__).resolve().parent.parent)
    return (
        filename.startswith((package, "<"))
        or "site-packages" in Path(filename).parts
        or filename.startswith(str(Path(traceback.__file__).parent))
    )


def describe_value(value: object) -> str:
    """Return the structure of a batch in a line: `dict(x=Tensor[8, 3] float32, y=Tensor[8] int64)`."""
    if isinstance(value, torch.Tensor):
        return f"Tensor{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__}({_fields(value.items())})"
    if isinstance(value, list | tuple):
        inner = ", ".join(describe_value(item) for item in value[:_SHOWN])
        more = f", ... {len(value)} in all" if len(value) > _SHOWN else ""
        return f"{type(value).__name__}({inner}{more})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return f"{type(value).__name__}({_fields(pairs)})"
    if isinstance(value, bool | int | float | str) or value is None:
        return repr(value) if len(repr(value)) < 30 else f"{type(value).__name__} {repr(value)[:27]}..."
    return type(value).__name__


def _fields(pairs: Iterable[tuple[object, object]]) -> str:
    listed = list(pairs)
    inner = ", ".join(f"{name}={describe_value(item)}" for name, item in listed[:_SHOWN])
    return inner + (f", ... {len(listed)} in all" if len(listed) > _SHOWN else "")
