"""`cluster.toml`: a Cluster as a file that people write and change."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import OptionError
from ..records import Cluster, from_json, to_json
from ..units import parse_bandwidth, parse_bytes
from .catalogue import find_kind

_HEADER = """\
A cluster as apportion sees it. Sizes may be written as "80GiB", rates as "450GB/s" or "400Gb/s".
Link rates are those of one device in one direction; inter_node has the oversubscription already taken out.
device may be the name of a kind in the catalogue (device = "H100") instead of a table."""
_SIZES = ("memory_bytes", "host_memory_bytes")
_RATES = ("memory_bytes_per_second", "bandwidth_bytes_per_second")


def read_cluster(path: Path) -> Cluster:
    """Return the cluster that a `cluster.toml` describes.

    Raises: OptionError if the file is missing, is not TOML, or has an unknown or missing key (naming the
    nearest one).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"cannot read the cluster file {path}", found=str(error), try_="give the path of a cluster.toml"
        ) from None
    try:
        return cluster_from_toml(text, name=path.stem)
    except OptionError as error:
        raise OptionError(f"{path}: {error.what}", found=error.found, try_=error.try_) from None


def cluster_from_toml(text: str, *, name: str = "cluster") -> Cluster:
    """Return the cluster of a TOML document; `name` and the links of a catalogue kind may be left out.

    Raises: OptionError as `read_cluster`.
    """
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise OptionError("not a TOML document", found=str(error)) from None
    return from_json(Cluster, _with_defaults(_in_base_units(data), name))


def cluster_to_toml(cluster: Cluster) -> str:
    """Return the `cluster.toml` of a cluster; `cluster_from_toml` reads it back to an equal record."""
    import tomlkit  # only writing needs it

    document = tomlkit.document()
    for line in _HEADER.splitlines():
        document.add(tomlkit.comment(line))
    for key, value in to_json(cluster).items():
        if value is not None:
            document.add(key, tomlkit.item(value))
    return tomlkit.dumps(document)


def _in_base_units(data: Mapping[str, Any]) -> dict[str, Any]:
    """Turn sizes, rates and whole numbers of seconds or dollars into what the record holds."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            out[key] = _in_base_units(value)
        elif isinstance(value, list):
            out[key] = [_in_base_units(item) if isinstance(item, Mapping) else item for item in value]
        elif isinstance(value, str) and key in _SIZES:
            out[key] = parse_bytes(value)
        elif isinstance(value, str) and key in _RATES:
            out[key] = parse_bandwidth(value)
        else:
            out[key] = value
    return out


def _with_defaults(data: dict[str, Any], name: str) -> dict[str, Any]:
    """Fill in the device and the links of catalogue kinds; what is not understood is left for the reader."""
    data.setdefault("name", name)
    nodes = data.get("nodes")
    if not isinstance(nodes, list):
        return data
    for node in nodes:
        if isinstance(node, dict) and isinstance(node.get("device"), str):
            kind = find_kind(node["device"])
            node["device"] = to_json(kind.device)
            data.setdefault("intra_node", to_json(kind.intra_node))
            per_node = node.get("devices_per_node")
            if isinstance(per_node, int) and per_node > 0:
                data.setdefault("inter_node", to_json(kind.inter_node(per_node)))
    return data
