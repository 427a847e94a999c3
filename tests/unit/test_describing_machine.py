"""This machine: ranks, memory, control groups, calibration."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from apportion.describing import calibrate, describe, save_calibration
from apportion.describing import machine as machine_module
from apportion.describing.calibration import measure_gloo_link
from apportion.describing.cgroup import core_quota, memory_room_bytes
from apportion.describing.machine import GLOO_LINK, cpu_cluster, describe_local, gpu_cluster
from apportion.describing.measure import measure_cpu
from apportion.describing.saved import calibration_path
from apportion.errors import OptionError, RankError
from apportion.records import DeviceType

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="looks at a machine without a GPU")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPORTION_CACHE", str(tmp_path))


@on_cpu
def test_local_is_one_rank_with_everything() -> None:
    cluster = describe("local")
    assert (cluster.num_nodes, cluster.num_devices, cluster.device.type) == (1, 1, DeviceType.CPU)
    assert cluster.device.peak_flops_per_second["fp32"] > 1e8
    assert cluster.nodes[0].cores >= 1


@on_cpu
def test_local_ranks_share_the_machine() -> None:
    one, two = describe("local:1"), describe("local:2")
    assert two.num_devices == 2
    assert two.device.peak_flops_per_second["fp32"] == one.device.peak_flops_per_second["fp32"] / 2
    assert two.device.memory_bytes < one.device.memory_bytes


def test_more_ranks_than_cores_is_a_warning() -> None:
    crowded = cpu_cluster(
        8, peaks={"fp32": 1e11}, memory_rate=1e10, link=GLOO_LINK, cores=2, memory_bytes=2**34
    )
    assert "8 processes share 2 cores" in crowded.warnings[0]
    assert crowded.device.peak_flops_per_second["fp32"] == 1e11 / 8
    roomy = cpu_cluster(2, peaks={"fp32": 1e11}, memory_rate=1e10, link=GLOO_LINK, cores=2, memory_bytes=2**34)
    assert roomy.warnings == ()


def test_memory_of_a_rank_leaves_room_for_its_process() -> None:
    cluster = cpu_cluster(
        4, peaks={"fp32": 1e11}, memory_rate=1e10, link=GLOO_LINK, cores=4, memory_bytes=2**34
    )
    assert 2**31 < cluster.device.memory_bytes < 2**32


def test_more_gpus_than_there_are_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(OptionError, match="more GPUs than there are"):
        describe_local(3)


def test_a_known_gpu_takes_its_rates_from_the_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name = "NVIDIA H100 80GB HBM3"
        total_memory = 80 * 2**30

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    cluster = gpu_cluster(2)
    assert cluster.device.kind == "H100"
    assert cluster.device.memory_bytes == 80 * 2**30, "capacity is read from the device"
    assert cluster.num_devices == 2


def test_an_unknown_gpu_is_measured_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name = "NVIDIA Tomorrow"
        total_memory = 2**36

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(machine_module, "cuda_rates", lambda: ({"fp32": 1e13, "bf16": 1e14}, 1e12))
    cluster = gpu_cluster(1)
    assert cluster.device.kind == "NVIDIA Tomorrow"
    assert "not in the device catalogue" in cluster.warnings[0]


def test_measuring_is_quick_and_leaves_the_threads() -> None:
    before = torch.get_num_threads()
    start = time.process_time()
    peaks, memory_rate = measure_cpu(1, seconds=0.01, side=128)
    assert time.process_time() - start < 0.5
    assert torch.get_num_threads() == before
    assert all(rate > 1e8 for rate in peaks.values())
    assert memory_rate > 1e8


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_unified_control_groups(tmp_path: Path) -> None:
    own = tmp_path / "self"
    own.write_text("0::/batch/job\n")
    write(tmp_path / "cg" / "batch", cpu__max="max 100000", memory__max=str(8 * 2**30), memory__current="0")
    write(
        tmp_path / "cg" / "batch" / "job",
        cpu__max="150000 100000",
        memory__max=str(4 * 2**30),
        memory__current=str(2**30),
        memory__stat=f"anon 5\ninactive_file {2**29}\n",
    )
    assert core_quota(tmp_path / "cg", own) == 1.5
    assert memory_room_bytes(tmp_path / "cg", own) == 4 * 2**30 - 2**29


def test_older_control_groups(tmp_path: Path) -> None:
    own = tmp_path / "self"
    own.write_text("5:memory:/job\n4:cpu,cpuacct:/job\n")
    write(
        tmp_path / "cg" / "memory" / "job",
        memory__limit_in_bytes=str(2**31),
        memory__usage_in_bytes=str(2**30),
    )
    write(tmp_path / "cg" / "cpu" / "job", cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000")
    assert memory_room_bytes(tmp_path / "cg", own) == 2**30
    assert core_quota(tmp_path / "cg", own) == 2.0


def test_no_limits(tmp_path: Path) -> None:
    own = tmp_path / "self"
    own.write_text("0::/\n5:memory:/\n")
    write(tmp_path / "cg", cpu__max="max 100000", memory__max="max")
    write(tmp_path / "cg" / "memory", memory__limit_in_bytes=str(2**63 - 4096))
    assert core_quota(tmp_path / "cg", own) is None
    assert memory_room_bytes(tmp_path / "cg", own) is None
    assert memory_room_bytes(tmp_path / "cg", tmp_path / "absent") is None


@on_cpu
def test_a_saved_calibration_is_used() -> None:
    measured = cpu_cluster(
        2,
        peaks={"fp32": 2e12, "bf16": 4e12},
        memory_rate=6e10,
        link=replace(GLOO_LINK, bandwidth_bytes_per_second=7e9),
        cores=2,
        memory_bytes=2**34,
    )
    path = save_calibration(replace(measured, calibrated=True))
    assert path == str(calibration_path(DeviceType.CPU))
    cluster = describe("local:4")
    assert cluster.calibrated
    assert cluster.device.peak_flops_per_second == {"fp32": 5e11, "bf16": 1e12}
    assert cluster.intra_node.bandwidth_bytes_per_second == 7e9


@on_cpu
def test_a_broken_calibration_is_an_error_that_names_the_file() -> None:
    calibration_path(DeviceType.CPU).write_text("nodes = 3")
    with pytest.raises(OptionError, match="calibration-"):
        describe("local")


@on_cpu
@pytest.mark.slow
def test_calibrate_measures_this_machine() -> None:
    cluster = calibrate()
    assert cluster.calibrated
    assert cluster.device.peak_flops_per_second["fp32"] > 1e8
    assert 1e6 < cluster.intra_node.bandwidth_bytes_per_second < 1e12
    assert 0 < cluster.intra_node.latency_seconds < 1


def test_a_failing_pair_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apportion.describing.calibration._PAIR", "raise SystemExit('no gloo here')")
    with pytest.raises(RankError, match="no gloo here"):
        measure_gloo_link()
