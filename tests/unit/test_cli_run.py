"""`train`, `verify` and `compare` with real processes, through the command line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_cli_commands import CASE, JOB

pytestmark = pytest.mark.slow

TRAIN = ["train", "job.py", "--devices", "local:2"]


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "case.py").write_text(CASE)


def apportion(words: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "apportion", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def run_json(words: list[str]) -> Any:
    done = apportion([*words, "--json"])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_run_is_kept_taken_up_again_and_guarded(tmp_path: Path) -> None:
    first = run_json([*TRAIN, "--steps", "3"])
    run_dir = tmp_path / "runs" / "job"
    assert (first["step"], first["stopped"]) == (3, False)
    assert first["parity"]["status"] == "equal"
    assert {"plan.json", "job.json", "metrics.jsonl", "checkpoints", "logs", "report.html"} <= {
        entry.name for entry in run_dir.iterdir()
    }
    job = json.loads((run_dir / "job.json").read_text())
    assert (job["batch_size"], job["devices"], job["steps"]) == (32, "local:2", 3)
    assert job["versions"]["torch"].startswith("2.")

    again = run_json([*TRAIN, "--steps", "5", "--run-dir", "runs/job"])
    assert again["step"] == 5
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5]

    other = apportion([*TRAIN, "--steps", "5", "--run-dir", "runs/job", "--set", "WIDTH=4"])
    assert other.returncode == 1
    assert "belongs to another job" in other.stderr

    page = run_json(["report", "runs/job", "--output", "page.html"])
    assert page["report"]["steps"][-1]["step"] == 5
    assert (tmp_path / "page.html").read_text().lower().startswith("<!doctype html>")


def test_verify_passes_and_compare_measures() -> None:
    found = run_json(["verify", "case.py", "--devices", "local:2", "--strategy", "ddp", "--steps", "2"])
    assert (found["status"], found["world_size"], found["steps"]) == ("equal", 2, 2)
    assert found["relative_error"]["weights"] < found["tolerance"]
    table = run_json(["compare", "job.py", "--devices", "local:2", "--strategy", "ddp", "--steps", "3"])
    measured = [row for row in table["rows"] if not row["reason"]]
    assert [row["strategy"] for row in measured] == ["ddp"]
    assert measured[0]["measured_step_seconds"] > 0
    assert (table["pick"], table["best"], table["regret"]) == ("ddp", "ddp", 0.0)


LOSS = "    return nn.functional.cross_entropy(output, batch[1])"
MODEL = "    return nn.Sequential("
RAISES = """
    class Weary(nn.Sequential):
        calls = 0

        def forward(self, x):
            self.calls += 1
            if os.environ.get("RANK") == "1" and self.calls > 20:
                raise ZeroDivisionError("had enough")
            return super().forward(x)

    import os
    return Weary("""


@pytest.mark.parametrize(
    ("old", "new", "code", "said"),
    [
        (LOSS, "    return output", 1, "scalar"),
        (LOSS, "    return output.sum() * float('nan')", 1, "nan"),
        (MODEL, RAISES, 5, "rank 1 on"),
        (MODEL, "    import os; os.environ.get('RANK') == '1' and os._exit(9)\n" + MODEL, 5, "rank 1"),
    ],
    ids=["no scalar", "nan", "raises", "dies"],
)
def test_a_rank_that_fails_is_told_with_its_cause(
    old: str, new: str, code: int, said: str, tmp_path: Path
) -> None:
    assert old in JOB
    (tmp_path / "job.py").write_text(JOB.replace(old, new))
    done = apportion([*TRAIN, "--epochs", "100"])
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    if new is RAISES:
        assert done.stderr.index("Traceback") < done.stderr.index("error: rank 1 on")
        assert "ZeroDivisionError: had enough" in done.stderr


def test_a_port_in_use_and_a_run_directory_that_cannot_be_made(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = apportion([*TRAIN, "--rdzv-endpoint", f"localhost:{port}"])
    assert done.returncode == 1
    assert f"port {port} cannot be used" in done.stderr
    (tmp_path / "file").touch()
    done = apportion([*TRAIN, "--run-dir", "file/run"])
    assert done.returncode == 1
    assert "cannot write to the run directory file/run" in done.stderr


def test_sigterm_saves_and_exits_with_6(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "apportion", *TRAIN, "--epochs", "100000", "--run-dir", "run", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 240
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.2)
        os.kill(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 6, err
    result = json.loads(out)
    assert result["stopped"]
    assert Path(result["checkpoint"]).is_dir()
    assert f"stopped on request after step {result['step']}" in err


def test_torchrun_is_joined(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "-m",
        "apportion",
        "train",
    ]
    command += ["job.py", "--steps", "2", "--run-dir", "run", "--plan", "fsdp", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 2  # one document, though there are two processes
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["best"]["strategy"] == "fsdp"
    assert plan["cluster"]["devices"] == 2
