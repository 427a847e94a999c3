"""Parse and format bytes, seconds, FLOP/s and rates. Inside the package only base units are held.

Datasheet bandwidths are decimal (GB = 10**9), device memory is binary (GiB = 2**30).
"""

from __future__ import annotations

import re

from .errors import OptionError

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "p": 10**15}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_QUANTITY = re.compile(r"^\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([kKmMgGtTpP]?i?)\s*([a-zA-Z/]*)\s*$")


def _scale(prefix: str) -> int:
    lowered = prefix.lower()
    return _BINARY.get(lowered) or _DECIMAL[lowered]


def parse_bytes(text: str) -> int:
    """Return the bytes that `text` names, such as `80GiB`, `80GB`, `512MiB` or `1024`.

    Raises: OptionError if it is not a size.
    """
    match = _QUANTITY.match(text)
    if match is None or match[3] not in ("", "B"):
        raise OptionError(f"'{text}' is not a size", try_="write it like 80GiB, 24GB or 512MiB")
    return int(float(match[1]) * _scale(match[2]))


def parse_bandwidth(text: str) -> float:
    """Return bytes per second from `900GB/s`, `400Gb/s`, `400Gbps` or `25GiB/s` (b is bits, B is bytes).

    Raises: OptionError if it is not a rate.
    """
    match = _QUANTITY.match(text)
    if match is None or match[3] not in ("B/s", "b/s", "bps", "bit/s", "Bps"):
        raise OptionError(f"'{text}' is not a bandwidth", try_="write it like 900GB/s or 400Gb/s")
    bits = match[3][0] == "b"
    return float(match[1]) * _scale(match[2]) / (8 if bits else 1)


def format_bytes(count: float) -> str:
    """Return `count` bytes in binary units: `12.3 GiB`."""
    sign, value = ("-" if count < 0 else ""), abs(float(count))
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            return f"{sign}{value:.0f} {unit}" if unit == "B" else f"{sign}{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """Return `seconds` with a fitting unit: `3.2 ms`, `1.4 s`, `2 h 5 min`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 120:
        return f"{seconds:.2f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def format_count(count: float) -> str:
    """Return a count in decimal units: `124.4M`, `7.0B`, `1.8T`."""
    value = float(count)
    for unit in ("", "K", "M", "B", "T"):
        if abs(value) < 1000 or unit == "T":
            return f"{value:.0f}" if unit == "" else f"{value:.1f}{unit}"
        value /= 1000
    raise AssertionError("unreachable")


def format_flops(flops: float) -> str:
    """Return FLOPs in decimal units: `3.2 TFLOP`."""
    value = float(flops)
    for unit in ("", "K", "M", "G", "T", "P", "E"):
        if abs(value) < 1000 or unit == "E":
            return f"{value:.1f} {unit}FLOP"
        value /= 1000
    raise AssertionError("unreachable")
