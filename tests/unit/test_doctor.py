"""The judgement of a machine's facts, and one look at the machine that runs the tests."""

from __future__ import annotations

import dataclasses
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from apportion.cli import main
from apportion.doctoring import Facts, check_facts, check_machine
from apportion.records import CheckStatus

GIB = 2**30
HEALTHY = Facts(
    python=(3, 12, 1),
    torch="2.13.0+cu128",
    cuda_build="12.8",
    cores=8,
    memory_bytes=64 * GIB,
    available_bytes=32 * GIB,
    shared_memory_bytes=32 * GIB,
    host="box",
    address="10.0.0.5",
    open_files=65536,
    locked_bytes=-1,
    run_dir="runs",
    disk_free_bytes=100 * GIB,
    optional={"transformers": "5.0"},
)
OK, WARNING, PROBLEM = CheckStatus.OK, CheckStatus.WARNING, CheckStatus.PROBLEM


def test_a_healthy_machine_has_nothing_to_mend() -> None:
    checks = check_facts(HEALTHY)
    assert {check.status for check in checks} == {OK}
    assert {check.fix for check in checks} == {""}
    assert len({check.name for check in checks}) == len(checks) >= 13


@pytest.mark.parametrize(
    ("name", "changes", "status", "found", "fix"),
    [
        ("python", {"python": (3, 10, 4)}, PROBLEM, "3.10.4", "Python 3.11"),
        ("torch", {"torch": "", "torch_error": "not installed"}, PROBLEM, "not installed", "pip install"),
        ("torch", {"torch": "2.12.1"}, PROBLEM, "2.12.1", "torch>=2.13"),
        ("torch", {"torch": "3.0.0"}, OK, "3.0.0", ""),
        ("devices", {"gpus": ("H100", "H100")}, OK, "2 x H100", ""),
        ("devices", {"gpus": ("H100", "A100")}, WARNING, "1 x H100, 1 x A100", "CUDA_VISIBLE_DEVICES"),
        ("devices", {"has_nvidia_device": True, "cuda_build": ""}, WARNING, "CPU build", "CUDA build"),
        ("devices", {"has_nvidia_device": True}, WARNING, "sees no GPU", "nvidia-smi"),
        ("collectives", {"gloo": False}, PROBLEM, "no gloo", "pytorch.org"),
        ("cores", {"cores": 1}, WARNING, "1 core", "--cpus"),
        ("cores", {"core_quota": 1.5}, WARNING, "limited to 1.5", "--cpus"),
        ("threads", {"omp_num_threads": "8"}, OK, "8 for 8 cores", ""),
        ("threads", {"omp_num_threads": "16"}, WARNING, "16 for 8 cores", "unset OMP_NUM_THREADS"),
        ("threads", {"omp_num_threads": "8", "core_quota": 2.0}, WARNING, "8 for 2 cores", "set it to 2"),
        ("threads", {"omp_num_threads": "many"}, PROBLEM, "'many'", "unset"),
        ("memory", {"available_bytes": GIB}, WARNING, "1.0 GiB free", "end other programs"),
        ("memory", {"memory_limit_bytes": GIB}, WARNING, "limited to 1.0 GiB", "--memory"),
        ("shared memory", {"shared_memory_bytes": 64 * 2**20}, WARNING, "64.0 MiB", "--shm-size"),
        ("shared memory", {"shared_memory_bytes": 0}, WARNING, "0 B", "--shm-size"),
        ("disk", {"disk_free_bytes": GIB}, WARNING, "1.0 GiB free", "--run-dir"),
        ("disk", {"disk_free_bytes": 2**20}, PROBLEM, "1.0 MiB free", "--run-dir"),
        ("disk", {"run_dir_writable": False}, PROBLEM, "cannot be written", "--run-dir"),
        ("host name", {"address": ""}, WARNING, "does not resolve", "/etc/hosts"),
        ("port", {"port": 29500}, OK, "29500 is free", ""),
        ("port", {"port": 29500, "port_error": "Address already in use"}, PROBLEM, "in use", "ss -ltnp"),
        ("port", {"port_error": "Operation not permitted"}, PROBLEM, "not permitted", "loopback"),
        ("open files", {"open_files": 1024}, WARNING, "at most 1024", "ulimit -n"),
        ("open files", {"open_files": -1}, OK, "unlimited", ""),
        ("locked memory", {"locked_bytes": 2**16}, OK, "64.0 KiB", ""),
        ("locked memory", {"locked_bytes": 2**16, "gpus": ("H100",)}, WARNING, "64.0 KiB", "ulimit -l"),
        ("optional", {"optional": {"transformers": ""}}, OK, "transformers is not installed", ""),
    ],
)
def test_each_fault_is_found_with_its_fix(
    name: str, changes: dict[str, Any], status: CheckStatus, found: str, fix: str
) -> None:
    check = next(one for one in check_facts(dataclasses.replace(HEALTHY, **changes)) if one.name == name)
    assert check.status is status
    assert found in check.found
    assert fix in check.fix
    assert bool(check.fix) == (status is not OK)


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    checks = {check.name: check for check in check_machine(run_dir=tmp_path / "not" / "yet" / "there")}
    assert checks["python"].status is OK
    assert checks["torch"].status is OK
    assert checks["port"].status is OK
    assert not (tmp_path / "not").exists()


def test_a_port_in_use_fails_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = ["doctor", "--port", str(port), "--run-dir", str(tmp_path)]
        assert main([*words, "--json"]) == 1
        captured = capsys.readouterr()
        checks = {check["name"]: check for check in json.loads(captured.out)}
        assert checks["port"]["status"] == "problem"
        assert f"{port}" in captured.err
        assert captured.err.startswith("error: this machine needs mending: port")
        assert main(words) == 1
        assert "✗ port" in capsys.readouterr().out
    assert main(words) == 0
