"""The `--devices` option: a spec or a file -> Cluster."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from ..errors import OptionError
from ..records import Cluster, Link, Node
from ..units import parse_bandwidth
from .catalogue import Kind, find_instance, find_kind, nearest, network_link, providers

_SHAPE = re.compile(r"^(?:(?P<nodes>\d+)x)?(?P<devices>\d+)x(?P<kind>[A-Za-z0-9].*)$")
_INSTANCE = re.compile(r"^(?P<provider>[a-z]+):(?P<name>[^*]+?)(?:\*(?P<count>\d+))?$")
_LOCAL = re.compile(r"^local(?::(?P<ranks>.*))?$")
_MAX_DEVICES_PER_NODE = 16  # DGX-2 and a2-megagpu-16g, the largest of the tables
_USUAL_DEVICES_PER_NODE = 8
FORMS = (
    "write local, local:4, 8xH100, 16x8xA100-80GB (nodes x devices x kind), aws:p5.48xlarge*4 or a cluster.toml"
)


def describe(
    spec: str,
    *,
    intra_node: str | None = None,
    inter_node: str | None = None,
    oversubscription: float = 1.0,
) -> Cluster:
    """Return the cluster that `spec` names.

    `spec` is `local` (what is here), `local:4` (four processes), `8xH100`, `16x8xA100-80GB` (nodes x devices x
    kind), `aws:p5.48xlarge*4` (also azure: and gcp:) or the path of a `cluster.toml`.

    Units:  `intra_node` is a rate as datasheets print it, both directions together (`900GB/s` for an H100);
            `inter_node` is the network port of one device, one direction (`400Gb/s`); `oversubscription`
            divides the latter.
    Raises: OptionError for an unknown form, kind, machine type or file, with the nearest name.
    """
    if not 1.0 <= oversubscription < float("inf"):
        raise OptionError(f"oversubscription is {oversubscription}", try_="give a number of at least 1")
    cluster = _read_spec(spec.strip())
    return _with_links(cluster, intra_node, inter_node, oversubscription)


def _read_spec(spec: str) -> Cluster:
    if local := _LOCAL.match(spec):
        ranks = _local_ranks(local["ranks"])
        from .machine import describe_local  # imports torch, which only this form needs

        return describe_local(ranks)
    if spec.lower().endswith(".toml") or (spec and Path(spec).is_file()):
        from .files import read_cluster

        return read_cluster(Path(spec))
    if shape := _SHAPE.match(spec):
        return _from_shape(spec, int(shape["nodes"] or 0), int(shape["devices"]), find_kind(shape["kind"]))
    if (instance := _INSTANCE.match(spec)) and instance["provider"] in providers():
        return _from_instance(
            spec, instance["provider"], instance["name"], _positive(instance["count"] or "1", spec)
        )
    raise OptionError(f"'{spec}' does not name any devices", try_=_hint(spec))


def _hint(spec: str) -> str:
    provider, colon, _ = spec.partition(":")
    if colon:
        return f"{nearest(provider, ['local', *providers()])} {FORMS}"
    return FORMS


def _positive(text: str, spec: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise OptionError(
            f"'{spec}' asks for {text or 'no number of'} devices", try_="give a whole number from 1"
        )
    return int(text)


def _local_ranks(text: str | None) -> int | None:
    return None if text is None else _positive(text, f"local:{text}")


def _from_shape(spec: str, nodes: int, devices: int, kind: Kind) -> Cluster:
    warnings: tuple[str, ...] = ()
    if devices < 1 or (nodes < 1 and spec.count("x") > 1 and spec.startswith("0x")):
        raise OptionError(f"'{spec}' has no devices", try_="give whole numbers from 1, such as 2x8xH100")
    if not nodes:
        nodes = 1
        if devices > _MAX_DEVICES_PER_NODE:
            if devices % _USUAL_DEVICES_PER_NODE:
                raise OptionError(
                    f"'{spec}' puts {devices} devices in one node",
                    try_=f"say how many nodes: NODESxDEVICESx{kind.name}",
                )
            nodes, devices = devices // _USUAL_DEVICES_PER_NODE, _USUAL_DEVICES_PER_NODE
            warnings = (f"{spec} is read as {nodes} nodes of {devices}; {nodes}x{devices}x{kind.name} says so",)
    return Cluster(
        name=spec,
        nodes=(Node(device=kind.device, devices_per_node=devices, count=nodes),),
        intra_node=kind.intra_node,
        inter_node=kind.inter_node(devices),
        warnings=warnings,
    )


def _from_instance(spec: str, provider: str, name: str, count: int) -> Cluster:
    instance = find_instance(provider, name)
    kind = find_kind(instance.kind)
    hourly = instance.dollars_per_hour
    return Cluster(
        name=spec,
        nodes=(Node(device=kind.device, devices_per_node=instance.devices, count=count, cores=instance.cores),),
        intra_node=kind.intra_node,
        inter_node=network_link(instance.network_gbit_s / instance.devices, kind.network_us * 1e-6),
        dollars_per_hour=None if hourly is None else hourly * count,
    )


def _with_links(
    cluster: Cluster, intra_node: str | None, inter_node: str | None, oversubscription: float
) -> Cluster:
    intra, inter = cluster.intra_node, cluster.inter_node
    if intra_node is not None:
        intra = _with_rate(intra, parse_bandwidth(intra_node) / 2, intra_node)
    if inter_node is not None:
        inter = _with_rate(inter, parse_bandwidth(inter_node) / cluster.oversubscription, inter_node)
    if oversubscription != 1.0:
        rate = inter.bandwidth_bytes_per_second * cluster.oversubscription / oversubscription
        inter = replace(inter, bandwidth_bytes_per_second=rate)
        cluster = replace(cluster, oversubscription=oversubscription)
    return replace(cluster, intra_node=intra, inter_node=inter)


def _with_rate(link: Link, rate: float, text: str) -> Link:
    if rate <= 0:
        raise OptionError(f"a link of {text} carries nothing", try_="give a rate above zero, such as 400Gb/s")
    return replace(link, bandwidth_bytes_per_second=rate)
