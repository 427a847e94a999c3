"""Where a Hugging Face configuration lies and what identifies it. Imports neither torch nor transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from ..errors import TargetError


def config_file(path: str) -> Path:
    """Return the `config.json` that `hf:PATH` names.

    Raises: TargetError if it is not there.
    """
    given = Path(path).expanduser()
    file = given / "config.json" if given.is_dir() else given
    if not file.is_file():
        raise TargetError(
            f"hf:{path} is not on this machine",
            found=f"no file {file}",
            try_="give the path of a config.json or of the folder that holds it (nothing is downloaded)",
        )
    return file


def hf_fingerprint(file: Path, overrides: Mapping[str, str], seq_len: int | None) -> str:
    """Return the hex digest of a configuration and what was set in it."""
    digest = hashlib.sha256(file.read_bytes())
    digest.update(json.dumps([sorted(overrides.items()), seq_len]).encode())
    return digest.hexdigest()
