"""Import a job file under a name that every process can import, and set its constants.

Note [job module names]
A dataset of a job file travels to loader workers by pickle, as the name of its module and class. Where workers
are not forked they must be able to import that module, so its name has to say where the file is:
`apportion.reading.files.job_<hex of a JSON document>`, found by the finder below, which importing this module
puts in place. The document holds the path, the constants that were overridden and the digest of the source,
so that two readings of one file with other constants are two modules.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Final

from ..errors import OptionError, TargetError
from .wording import last_line, nearest

_PREFIX: Final = "apportion.reading.files.job_"
_LITERALS = (bool, int, float, str, tuple, list, dict, set, type(None))

# What `import apportion.reading.files.job_...` looks in: makes this module a package for its finder.
__path__: list[str] = []


class _JobLoader(SourceFileLoader):
    """Runs a job file, then sets its overridden constants."""

    def __init__(self, name: str, path: str, overrides: Mapping[str, str]) -> None:
        super().__init__(name, path)
        self.overrides = overrides

    def exec_module(self, module: ModuleType) -> None:
        _put_on_path(Path(self.path).parent)
        super().exec_module(module)
        set_constants(module, self.overrides)


class _JobFinder:
    """Finds the modules whose name holds the document of Note [job module names]."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(_PREFIX):
            return None
        document = json.loads(bytes.fromhex(fullname.removeprefix(_PREFIX)))
        loader = _JobLoader(fullname, document["path"], document["set"])
        return importlib.util.spec_from_file_location(fullname, document["path"], loader=loader)


sys.meta_path.append(_JobFinder)


def source_digest(path: Path, overrides: Mapping[str, str]) -> str:
    """Return the hex digest of a source file and the constants set in it."""
    digest = hashlib.sha256(path.read_bytes())
    digest.update(json.dumps(sorted(overrides.items())).encode())
    return digest.hexdigest()


def import_file(path: Path, overrides: Mapping[str, str]) -> ModuleType:
    """Return the module of a Python file with its constants overridden.

    Raises: TargetError if there is no such file or it raises; OptionError for an unknown constant.
    """
    where = path.resolve()
    document = {"path": str(where), "set": dict(overrides), "digest": source_digest(where, overrides)[:16]}
    name = _PREFIX + json.dumps(document, sort_keys=True).encode().hex()
    return _import(name, str(path))


def import_dotted(name: str, overrides: Mapping[str, str]) -> ModuleType:
    """Return the module `package.module`, looked for in the current folder first, with its constants set.

    Raises: TargetError if it cannot be found or raises; OptionError for an unknown constant.
    """
    _put_on_path(Path.cwd())
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    if found is None or found.origin is None:
        hint = f"{name}.py" if Path(f"{name}.py").exists() else "file.py, file.py:function or hf:PATH"
        raise TargetError(
            f"no module named '{name}'",
            found=f"looked in {Path.cwd()} and the installed packages",
            try_=f"give a target such as {hint}",
        )
    module = _import(name, name)
    set_constants(module, overrides)
    return module


def _import(name: str, shown: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (TargetError, OptionError):
        raise
    except (Exception, SystemExit) as error:  # the user's code may raise anything; it is told, with its place
        raise TargetError(
            f"{shown} cannot be imported",
            found=last_line(error),
            try_="mend the file, or run it with python to see the whole traceback (or add -v here)",
        ) from error


def _put_on_path(folder: Path) -> None:
    """Let the file import its neighbours, as `python file.py` would."""
    text = str(folder.resolve())
    if text not in sys.path:
        sys.path.insert(0, text)


def set_constants(module: ModuleType, overrides: Mapping[str, str]) -> None:
    """Set module-level constants from `name=value` pairs; values are Python literals.

    Raises: OptionError for an unknown name (with the nearest) or a value of another kind.
    """
    known = {name: value for name, value in vars(module).items() if _is_constant(name, value)}
    for name, text in overrides.items():
        if name not in known:
            raise OptionError(
                f"--set {name}={text}: {Path(module.__file__ or module.__name__).name} has no such constant",
                try_=nearest(name, known, kind="constants"),
            )
        setattr(module, name, parse_literal(name, text, known[name]))


def _is_constant(name: str, value: object) -> bool:
    return not name.startswith("_") and type(value) in _LITERALS


def parse_literal(name: str, text: str, old: object) -> object:
    """Return the value of `name=text`, of the kind that `old` has (a float may be given as an int).

    Raises: OptionError if it is not such a literal.
    """
    value: object
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if isinstance(old, str):
        return value if isinstance(value, str) else text
    if type(old) is float and type(value) is int:
        return float(value)
    if old is not None and value is not None and type(value) is not type(old):
        raise OptionError(
            f"--set {name}={text}: the value should be {_kind(old)}",
            found=f"{_kind(value)}; the value now is {old!r}",
            try_=f"--set {name}={old!r}, for example",
        )
    return value


def _kind(value: object) -> str:
    names = {bool: "True or False", int: "an integer", float: "a number", str: "text", type(None): "None"}
    return names.get(type(value), f"a {type(value).__name__}")
