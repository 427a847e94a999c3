"""`apportion train` from outside, on two processes: interrupted, killed, broken, resumed, joined."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow

NUM_STEPS = 40
BATCH_SIZE = 32
JOB = """
import os
import time

import torch
from torch import nn

SAMPLES = 200


def model():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))


def data(split):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 16, generator=generator)
    y = (x @ torch.randn(16, 4, generator=generator)).argmax(1)
    return torch.utils.data.TensorDataset(x, y) if split == "train" else None


def forward(model, batch):
    if model.training:
        time.sleep(float(os.environ.get("JOB_PAUSE", "0")))
    return model(batch[0])


def loss(output, batch):
    return nn.functional.cross_entropy(output, batch[1])


def schedule(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
"""
BREAKING = """
CALLS = 0


def loss(output, batch):
    global CALLS
    CALLS += 1
    if os.environ.get("RANK") == "1" and CALLS > 50:
        raise ZeroDivisionError("the loss broke")
    return nn.functional.cross_entropy(output, batch[1])
"""


def job_file(folder: Path, more: str = "") -> Path:
    path = folder / "job.py"
    path.write_text(JOB + more)
    return path


def command(job: Path, run_dir: Path, *more: str) -> list[str]:
    options = ["--steps", str(NUM_STEPS), "--batch-size", str(BATCH_SIZE), "--run-dir", str(run_dir)]
    return ["-m", "apportion", "train", str(job), *options, "--strategy", "ddp", *more]


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"} | more


def train(job: Path, run_dir: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command(job, run_dir, "--devices", "local:2", *more)],
        env=environment(),
        text=True,
        capture_output=True,
        timeout=300,
    )


def start(job: Path, run_dir: Path, *more: str) -> subprocess.Popen[str]:
    """Start a run with slow steps."""
    return subprocess.Popen(
        [sys.executable, *command(job, run_dir, "--devices", "local:2", *more)],
        env=environment(JOB_PAUSE="0.1"),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def losses(run_dir: Path) -> list[tuple[int, float]]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [(record["step"], record["loss"]) for record in map(json.loads, lines)]


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int) -> None:
    end = time.monotonic() + 200
    metrics = run_dir / "metrics.jsonl"
    while time.monotonic() < end and process.poll() is None:
        if metrics.exists() and metrics.read_text().count("\n") >= step:
            return
        time.sleep(0.05)
    raise AssertionError(f"no step {step}: {process.communicate()}")


def ranks_of(process: subprocess.Popen[str]) -> dict[int, int]:
    """The process ids of a run's ranks."""
    children = psutil.Process(process.pid).children()
    ranks = [child for child in children if "apportion.rank" in child.cmdline()]
    return {int(child.environ()["RANK"]): child.pid for child in ranks}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    """The loss column of a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    done = train(job_file(folder), folder / "run")
    assert done.returncode == 0, done.stderr
    return losses(folder / "run")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_goes_on_bit_for_bit(
    tmp_path: Path, whole: list[tuple[int, float]], number: signal.Signals
) -> None:
    job, run_dir = job_file(tmp_path), tmp_path / "run"
    process = start(job, run_dir)
    wait_for_step(process, run_dir, 10)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 6, errors
    assert "stopped on request after step" in errors
    done = len(losses(run_dir))
    assert 10 <= done < NUM_STEPS
    assert (run_dir / "checkpoints" / f"step-{done}").is_dir()
    assert train(job, run_dir).returncode == 0
    assert losses(run_dir) == whole
    assert [step for step, _ in whole] == list(range(1, NUM_STEPS + 1))


def test_a_killed_rank_ends_the_run_and_the_run_goes_on_bit_for_bit(
    tmp_path: Path, whole: list[tuple[int, float]]
) -> None:
    job, run_dir = job_file(tmp_path), tmp_path / "run"
    process = start(job, run_dir, "--save-every", "5")
    wait_for_step(process, run_dir, 13)
    ranks = ranks_of(process)
    assert set(ranks) == {0, 1}
    killed_at = time.monotonic()
    os.kill(ranks[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - killed_at < 6
    assert process.returncode == 5
    assert "rank 1 on" in errors
    assert "was killed by signal 9 (SIGKILL)" in errors
    assert "Traceback" not in errors
    assert not any(psutil.pid_exists(pid) for pid in ranks.values())
    assert train(job, run_dir).returncode == 0
    assert losses(run_dir) == whole


def test_a_restart_after_a_killed_rank_goes_on_bit_for_bit(
    tmp_path: Path, whole: list[tuple[int, float]]
) -> None:
    job, run_dir = job_file(tmp_path), tmp_path / "run"
    process = start(job, run_dir, "--save-every", "5", "--max-restarts", "1")
    wait_for_step(process, run_dir, 13)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors
    assert losses(run_dir) == whole


def test_a_rank_that_raises_shows_its_traceback_first(tmp_path: Path) -> None:
    done = train(job_file(tmp_path, BREAKING), tmp_path / "run")
    assert done.returncode == 5, done.stderr
    trace, _, rest = done.stderr.partition("ZeroDivisionError: the loss broke\n")
    assert "in loss" in trace
    assert "rank 1 on" in rest.splitlines()[0]
    assert "failed: ZeroDivisionError: the loss broke" in rest.splitlines()[0]
    assert "gloo" not in done.stderr.lower()
    assert done.stderr.count("Traceback") == 1


def test_another_jobs_directory_is_left_alone(tmp_path: Path, whole: list[tuple[int, float]]) -> None:
    run_dir = tmp_path / "run"
    assert train(job_file(tmp_path), run_dir, "--set", "SAMPLES=100").returncode == 0
    before = (run_dir / "metrics.jsonl").read_bytes()
    done = train(job_file(tmp_path), run_dir)
    assert done.returncode == 1
    assert "belongs to another job" in done.stderr
    assert (run_dir / "metrics.jsonl").read_bytes() == before
    assert train(job_file(tmp_path), run_dir, "--resume", "off").returncode == 0
    assert losses(run_dir) == whole
    assert (run_dir / "previous-1" / "metrics.jsonl").read_bytes() == before


def test_inside_torchrun(tmp_path: Path, whole: list[tuple[int, float]]) -> None:
    run_dir = tmp_path / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, *command(job_file(tmp_path), run_dir)],
        env=environment(),
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert losses(run_dir) == whole
    assert (run_dir / "report.html").is_file()
