"""Specs, the catalogue, cluster files."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from apportion.describing import (
    cluster_from_toml,
    cluster_to_toml,
    describe,
    find_kind,
    kinds,
    read_cluster,
)
from apportion.describing.catalogue import find_cuda_kind, find_instance, providers
from apportion.errors import OptionError
from apportion.records import DeviceType


def test_devices_in_one_node() -> None:
    cluster = describe("8xH100")
    assert (cluster.num_nodes, cluster.num_devices, cluster.device.kind) == (1, 8, "H100")
    assert cluster.intra_node.bandwidth_bytes_per_second == 450e9
    assert cluster.inter_node.bandwidth_bytes_per_second == 50e9
    assert cluster.warnings == ()


def test_nodes_times_devices_times_kind() -> None:
    cluster = describe("16x8xA100-80GB")
    assert (cluster.num_nodes, cluster.num_devices, cluster.device.kind) == (16, 128, "A100-80GB")
    assert 79 * 2**30 < cluster.device.memory_bytes < 80 * 2**30


def test_many_devices_without_nodes_are_read_as_nodes_of_eight_and_said() -> None:
    cluster = describe("64xH100")
    assert (cluster.num_nodes, cluster.num_devices) == (8, 64)
    assert "8x8xH100" in cluster.warnings[0]


@pytest.mark.parametrize(
    ("alias", "kind"), [("a100", "A100-80GB"), ("H100-80GB", "H100"), ("4090", "RTX-4090")]
)
def test_aliases_and_case(alias: str, kind: str) -> None:
    assert describe(f"2x{alias}").device.kind == kind


def test_cloud_machines_bring_their_network_and_price() -> None:
    cluster = describe("aws:p5.48xlarge*4")
    assert (cluster.num_nodes, cluster.num_devices, cluster.device.kind) == (4, 32, "H100")
    assert cluster.inter_node.bandwidth_bytes_per_second == pytest.approx(3200e9 / 8 / 8)
    assert cluster.dollars_per_hour == pytest.approx(4 * 55.04)
    assert describe("aws:p5e.48xlarge").dollars_per_hour is None


def test_every_machine_type_names_a_kind_of_the_catalogue() -> None:
    from apportion.describing import catalogue

    for provider in providers():
        for name, row in catalogue._instances()[provider].items():
            assert find_kind(row.kind).name in kinds()
            assert find_instance(provider, name.upper()) is row
            assert (row.dollars_per_hour is None) == (row.price == ""), f"{name}: a price carries its date"


def test_links_can_be_set() -> None:
    cluster = describe("2x8xH100", intra_node="600GB/s", inter_node="200Gb/s", oversubscription=2)
    assert cluster.intra_node.bandwidth_bytes_per_second == 300e9, "datasheets count both directions"
    assert cluster.inter_node.bandwidth_bytes_per_second == 12.5e9
    assert cluster.oversubscription == 2
    same = describe("8xH100", intra_node="900GB/s", inter_node="400Gb/s")
    assert same.intra_node == describe("8xH100").intra_node
    assert same.inter_node == describe("8xH100").inter_node


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("8xH10", "H100"),
        ("8xA100-8GB", "A100-80GB"),
        ("aws:p5.48xlarg", "p5.48xlarge"),
        ("awz:p5.48xlarge", "aws"),
        ("lokal:4", "local"),
        ("local:0", "from 1"),
        ("local:two", "from 1"),
        ("aws:p5.48xlarge*0", "from 1"),
        ("17xH100", "NODESxDEVICESxH100"),
        ("0xH100", "from 1"),
        ("0x8xH100", "from 1"),
        ("nothing", "cluster.toml"),
        ("", "cluster.toml"),
        ("missing.toml", "cluster.toml"),
    ],
)
def test_what_cannot_be_read_names_the_nearest(spec: str, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        describe(spec)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [{"oversubscription": 0.5}, {"intra_node": "fast"}, {"inter_node": "400"}, {"inter_node": "0Gb/s"}],
)
def test_bad_links_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        describe("8xH100", **options)  # type: ignore[arg-type]


def test_catalogue_rows_are_plausible() -> None:
    for name, kind in kinds().items():
        device = kind.device
        assert device.type is DeviceType.CUDA
        assert 2**33 < device.memory_bytes < 2**38, name
        assert set(device.efficiency) == set(device.peak_flops_per_second), name
        assert all(0.3 <= part <= 0.95 for part in device.efficiency.values()), name
        peaks = device.peak_flops_per_second
        assert peaks["fp32"] <= peaks["fp16"] <= peaks.get("fp8", peaks["fp16"]), name
        assert bool(kind.network_gbit_s_per_device) != bool(kind.network_gbit_s_per_node), name


def test_aliases_belong_to_one_kind() -> None:
    spellings = [spelling.lower() for kind in kinds().values() for spelling in (kind.name, *kind.aliases)]
    assert len(spellings) == len(set(spellings))


@pytest.mark.parametrize(
    ("cuda_name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA A10G", "A10G"),
        ("Tesla T4", "T4"),
    ],
)
def test_driver_names_find_their_row(cuda_name: str, kind: str) -> None:
    found = find_cuda_kind(cuda_name)
    assert found is not None
    assert found.name == kind


def test_unknown_driver_names_find_none() -> None:
    assert find_cuda_kind("NVIDIA Tomorrow 9000") is None


@pytest.mark.parametrize("spec", ["8xH100", "3x4xL4", "aws:p4d.24xlarge*2", "64xH100"])
def test_cluster_files_round_trip(spec: str, tmp_path: Path) -> None:
    cluster = replace(describe(spec, oversubscription=3), calibrated=True)
    assert cluster_from_toml(cluster_to_toml(cluster)) == cluster
    path = tmp_path / "cluster.toml"
    path.write_text(cluster_to_toml(cluster))
    assert read_cluster(path) == cluster
    assert describe(str(path)) == cluster


def test_a_short_cluster_file_takes_the_rest_from_the_catalogue(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        """
        dollars_per_hour = 12
        inter_node = { kind = "network", bandwidth_bytes_per_second = "100Gb/s", latency_seconds = 2e-5 }
        [[nodes]]
        count = 2
        devices_per_node = 8
        host_memory_bytes = "1TiB"
        device = "A100-40GB"
        """
    )
    cluster = describe(str(path))
    assert (cluster.name, cluster.num_devices, cluster.device.kind) == ("mine", 16, "A100-40GB")
    assert cluster.inter_node.bandwidth_bytes_per_second == 12.5e9
    assert cluster.intra_node == find_kind("A100-40GB").intra_node
    assert cluster.dollars_per_hour == 12.0
    assert cluster.nodes[0].host_memory_bytes == 2**40


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[[nodes]]\ndevice = "H100"\ndevices_per_nod = 8', "devices_per_node"),
        ('[[nodes]]\ndevice = "H10"\ndevices_per_node = 8', "H100"),
        ("oversubscriptio = 2", "oversubscription"),
        ('[[nodes]]\ndevice = "H100"', "devices_per_node"),
        ('[[nodes]]\ndevice = "H100"\ndevices_per_node = "eight"', "should be int"),
        ('[[nodes]]\ndevice = "H100"\ndevices_per_node = 0', "at least one device"),
        ("name = 'empty'", "lacks a key"),
        ("name = ", "TOML"),
    ],
)
def test_wrong_cluster_files_say_what_is_wrong(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(OptionError) as caught:
        describe(str(path))
    assert says in str(caught.value)
    assert "cluster.toml" in str(caught.value)


def test_importing_is_cheap() -> None:
    code = (
        "import sys, apportion.describing, apportion.costing, apportion.planning;"
        "apportion.describing.describe('8xH100');"
        "print([m for m in ('torch', 'numpy', 'pydantic', 'tomlkit') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
