"""Profiles of configurations, kept between commands: planning again needs neither torch nor the model.

Only `hf:` targets are kept, since their configuration is all that a profile depends on; a job file may depend
on its data. An entry is found again only for the same configuration, overrides, sizes, library versions and
source of this package. `APPORTION_CACHE` names another folder, or is `off`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

from .errors import ApportionError
from .records import DeviceType, Profile, from_json_text, to_json_text


def kept_profile(key: str, make: Callable[[], Profile]) -> Profile:
    """Return the profile kept under `key`, or make it and keep it where the folder can be written."""
    folder = _folder()
    if folder is None:
        return make()
    file = folder / f"{key}.json"
    try:
        return from_json_text(Profile, file.read_text())
    except (OSError, UnicodeDecodeError, ApportionError):
        profile = make()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside = file.with_suffix(f".{os.getpid()}")
        beside.write_text(to_json_text(profile, indent=None))
        beside.replace(file)
    except OSError:
        return profile
    return profile


def _folder() -> Path | None:
    text = os.environ.get("APPORTION_CACHE", "")
    if text == "off":
        return None
    base = Path(text) if text else Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "apportion"
    return base / "profiles"


def profile_key(
    fingerprint: str, *, batch_samples: int, device_type: DeviceType, versions: dict[str, str]
) -> str:
    """Return the name under which a profile is kept: a digest of all that it depends on."""
    package = Path(__file__).parent
    sources = [
        (str(file.relative_to(package)), file.stat().st_mtime_ns, file.stat().st_size)
        for part in ("profiling", "reading", "records")
        for file in sorted((package / part).glob("*.py"))
    ]
    parts = [fingerprint, batch_samples, device_type.value, sorted(versions.items()), sources]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
