"""The catalogue of devices and of cloud machine types: `devices.toml` and `instances.toml`."""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources

from ..errors import OptionError
from ..records import Device, DeviceType, Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One row of `devices.toml`; the units are explained at its top."""

    name: str
    aliases: tuple[str, ...]
    memory_mib: int
    memory_gb_s: float
    peak_tflops: Mapping[str, float]
    efficiency: Mapping[str, float]
    link: str
    link_gb_s: float
    link_us: float
    network_us: float
    network_gbit_s_per_device: float = 0.0
    network_gbit_s_per_node: float = 0.0
    cuda_names: tuple[str, ...] = field(default=())

    @property
    def device(self) -> Device:
        return Device(
            kind=self.name,
            type=DeviceType.CUDA,
            memory_bytes=self.memory_mib * 2**20,
            peak_flops_per_second={name: rate * 1e12 for name, rate in self.peak_tflops.items()},
            memory_bytes_per_second=self.memory_gb_s * 1e9,
            efficiency=dict(self.efficiency),
            source="devices.toml",
        )

    @property
    def intra_node(self) -> Link:
        return Link(
            kind=self.link,
            bandwidth_bytes_per_second=self.link_gb_s * 1e9,
            latency_seconds=self.link_us * 1e-6,
        )

    def inter_node(self, devices_per_node: int) -> Link:
        """Return the network as one device sees it where `devices_per_node` share a node's ports."""
        gbit_s = self.network_gbit_s_per_device or self.network_gbit_s_per_node / devices_per_node
        return network_link(gbit_s, self.network_us * 1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One row of `instances.toml`."""

    name: str
    kind: str
    devices: int
    network_gbit_s: float
    cores: int = 0
    dollars_per_hour: float | None = None
    price: str = ""


def network_link(gbit_s: float, latency_seconds: float) -> Link:
    """Return a network link of `gbit_s` gigabits per second and device, one direction."""
    return Link(kind="network", bandwidth_bytes_per_second=gbit_s * 1e9 / 8, latency_seconds=latency_seconds)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a `try_` line: the nearest known name, or all of them."""
    by_lower = {item.lower(): item for item in known}
    near = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.5)
    if near:
        return f"did you mean '{by_lower[near[0]]}'?"
    return f"one of {', '.join(sorted(by_lower.values()))}"


def _read(name: str) -> Mapping[str, Mapping[str, object]]:
    text = resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
    return tomllib.loads(text)


@functools.cache
def kinds() -> Mapping[str, Kind]:
    """Return the device catalogue by name."""
    rows: dict[str, Kind] = {}
    for name, row in _read("devices.toml").items():
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        rows[name] = Kind(name=name, **values)  # type: ignore[arg-type]
    return rows


@functools.cache
def _kind_names() -> Mapping[str, str]:
    return {alias.lower(): name for name, kind in kinds().items() for alias in (name, *kind.aliases)}


def find_kind(name: str) -> Kind:
    """Return the catalogue row of a kind, whichever case or alias it is written in.

    Raises: OptionError naming the nearest kind.
    """
    found = _kind_names().get(name.lower())
    if found is None:
        spellings = [*kinds(), *(alias for kind in kinds().values() for alias in kind.aliases)]
        raise OptionError(f"no device kind '{name}' in the catalogue", try_=nearest(name, spellings))
    return kinds()[found]


def find_cuda_kind(cuda_name: str) -> Kind | None:
    """Return the row whose `cuda_names` hold the longest prefix of what the driver calls the device."""
    matches = [
        (len(prefix), kind.name)
        for kind in kinds().values()
        for prefix in kind.cuda_names
        if cuda_name.startswith(prefix)
    ]
    return kinds()[max(matches)[1]] if matches else None


@functools.cache
def _instances() -> Mapping[str, Mapping[str, Instance]]:
    return {
        provider: {
            name: Instance(name=name, **row)  # type: ignore[arg-type]
            for name, row in rows.items()
        }
        for provider, rows in _read("instances.toml").items()
    }


def providers() -> tuple[str, ...]:
    """Return the cloud providers that the instance table knows."""
    return tuple(_instances())


def find_instance(provider: str, name: str) -> Instance:
    """Return a machine type of a provider.

    Raises: OptionError naming the nearest one.
    """
    rows = {key.lower(): row for key, row in _instances()[provider].items()}
    if name.lower() not in rows:
        raise OptionError(
            f"no {provider} machine type '{name}' in the table", try_=nearest(name, _instances()[provider])
        )
    return rows[name.lower()]
