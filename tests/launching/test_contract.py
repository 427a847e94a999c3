"""What every way of starting ranks must do, on each that is present: the contract of `launching`.

`local` is ours; `joined` is ranks that PyTorch's own `torchrun` has started and that find their place in the
environment.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from apportion.errors import OptionError, RankError, RefusedError, StoppedError
from apportion.launching import Outcome, Tick, launch

pytestmark = [
    pytest.mark.slow,
    # PyTorch's agent (torch 2.13) leaves the log files of ranks that ended by themselves to the collector.
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),
    pytest.mark.filterwarnings(
        "ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning"
    ),
]

HERE = Path(__file__).parent
ENV = {"PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
# From a failure to the end of all ranks; the launcher looks ten times a second.
STOP_SECONDS = 5.0


@dataclass
class Work:
    """A task file and what the launch told."""

    task: Path
    output: str = ""
    ended_at: float = 0.0

    @property
    def folder(self) -> Path:
        return self.task.parent

    def take(self, tick: Tick) -> None:
        self.output += tick.output

    def launch(self, num_ranks: int = 2, *, max_restarts: int = 0, **env: str) -> Outcome:
        try:
            return launch(
                self.task,
                num_ranks=num_ranks,
                log_dir=self.folder / "logs",
                env=ENV | env,
                max_restarts=max_restarts,
                on_tick=self.take,
                program="rank_programs",
            )
        finally:
            self.ended_at = time.time()

    def torchrun(self, num_ranks: int = 2) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={num_ranks}", "-m", "rank_programs", str(self.task)]
        return subprocess.Popen(
            command, env=os.environ | ENV, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def processes(self) -> list[int]:
        """The processes that work on the task, this one and its torchrun left out."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if str(self.task) in command and "torch.distributed.run" not in command:
                found.append(process.pid)
        return found


def work(tmp_path: Path, name: str) -> Work:
    task = tmp_path / "task.json"
    task.write_text(json.dumps({"work": name, "folder": str(tmp_path)}))
    return Work(task)


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    gc.collect()
    end = time.monotonic() + STOP_SECONDS
    left = Work(tmp_path / "task.json").processes()
    while left and time.monotonic() < end:
        time.sleep(0.1)
        left = Work(tmp_path / "task.json").processes()
    assert left == []


def signal_later(number: signal.Signals, *, when: Path) -> threading.Thread:
    """Send ourselves a signal once the ranks write events (they take signals then)."""

    def send() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end and not when.exists():
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


# ---- both


@pytest.mark.parametrize("backend", ["local", "joined"])
def test_ranks_meet(tmp_path: Path, backend: str) -> None:
    job = work(tmp_path, "add_up")
    if backend == "local":
        outcome = job.launch(3)
        assert (outcome.num_ranks, outcome.restarts, outcome.stop_requested) == (3, 0, False)
    else:
        assert job.torchrun(3).wait(120) == 0
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(3)] == ["6", "6", "6"]


@pytest.mark.parametrize("backend", ["local", "joined"])
def test_a_rank_that_raises_is_named(tmp_path: Path, backend: str) -> None:
    job = work(tmp_path, "raise_on_one")
    if backend == "local":
        with pytest.raises(RankError, match=r"rank 1 on .* failed: ZeroDivisionError: rank 1 divided by zero"):
            job.launch()
        shown = job.output
    else:
        process = job.torchrun()
        _, shown = process.communicate(timeout=120)
        assert process.returncode != 0
    assert "in raise_on_one" in shown
    assert "ZeroDivisionError: rank 1 divided by zero" in shown


@pytest.mark.parametrize("backend", ["local", "joined"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_is_agreed(tmp_path: Path, backend: str, number: signal.Signals) -> None:
    job = work(tmp_path, "step_until_stopped")
    if backend == "local":
        sender = signal_later(number, when=tmp_path / "events" / "rank-1.jsonl")
        assert job.launch().stop_requested
        sender.join()
        assert "stopping" in job.output
    else:
        process = job.torchrun()
        wait_for_steps(job)
        process.send_signal(number)
        process.communicate(timeout=60)
    stopped = {(tmp_path / f"stopped-{rank}").read_text() for rank in range(2)}
    assert len(stopped) == 1
    assert 1 <= int(stopped.pop()) < 4999


def wait_for_steps(job: Work) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end and not (job.folder / "stepping").exists():
        time.sleep(0.05)
    time.sleep(0.5)


def test_joined_ranks_that_cannot_stop_end_in_time(tmp_path: Path) -> None:
    """One waits in a collective, where Python's signal handlers do not run; the other never comes to an end."""
    job = work(tmp_path, "stand_still")
    process = job.torchrun()
    wait_for_steps(job)
    started = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert time.monotonic() - started < STOP_SECONDS + 1  # torchrun itself takes a moment to leave


# ---- ours alone


def test_logs_and_rank_0_output(tmp_path: Path) -> None:
    job = work(tmp_path, "add_up")
    job.launch()
    for rank in range(2):
        for stream in ("stdout", "stderr"):
            assert (tmp_path / "logs" / str(rank) / f"{stream}.log").read_text() == f"rank {rank} on {stream}\n"
    assert "rank 0 on stdout\n" in job.output
    assert "rank 0 on stderr\n" in job.output
    assert "rank 1" not in job.output
    job.launch()  # what is there of the first start is kept
    assert (tmp_path / "logs" / "1" / "stdout.1.log").read_text() == "rank 1 on stdout\n"


def test_peers_complaints_are_not_shown(tmp_path: Path) -> None:
    job = work(tmp_path, "raise_on_one")
    with pytest.raises(RankError):
        job.launch()
    assert job.output.startswith("Traceback")
    assert job.output.count("Traceback") == 1
    assert "Connection" not in job.output


def test_our_own_errors_come_through(tmp_path: Path) -> None:
    with pytest.raises(RefusedError) as caught:
        work(tmp_path, "refuse").launch()
    error = caught.value
    assert (error.what, error.found, error.try_) == ("cannot split it", "an odd number", "an even one")
    assert error.exit_code == 3


def test_a_killed_rank_is_named_with_signal_and_place(tmp_path: Path) -> None:
    job = work(tmp_path, "kill_itself")
    with pytest.raises(RankError, match=r"rank 1 on .* was killed by signal 9 \(SIGKILL\)") as caught:
        job.launch()
    assert caught.value.found == "it was in step 3"
    assert caught.value.exit_code == 5


def test_a_rank_that_leaves_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 1 on .* ended with exit code 7") as caught:
        work(tmp_path, "leave").launch()
    assert caught.value.found == "about to leave"


def test_ranks_that_do_not_listen_are_killed_in_time(tmp_path: Path) -> None:
    job = work(tmp_path, "be_stubborn")
    with pytest.raises(RankError, match="ValueError: the first to fail"):
        job.launch()
    last = (tmp_path / "events" / "rank-1.jsonl").read_text().splitlines()[-1]
    assert job.ended_at - json.loads(last)["time"] < STOP_SECONDS


def test_the_last_words_of_a_failed_rank_0_are_shown(tmp_path: Path) -> None:
    job = work(tmp_path, "raise_on_zero")
    with pytest.raises(RankError, match="rank 0 on"):
        job.launch()
    assert job.output.startswith("last words\nTraceback")


def test_a_hang_names_the_rank_that_is_behind(tmp_path: Path) -> None:
    job = work(tmp_path, "stand_still")
    with pytest.raises(RankError, match="behind is rank 1") as caught:
        job.launch(APPORTION_STEP_TIMEOUT="12")
    assert "rank 0 in step 1; rank 1 loading the data of step 1" in caught.value.found
    assert "stand_still" in (tmp_path / "logs" / "1" / "stderr.log").read_text()


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    job = work(tmp_path, "stand_still")
    events = tmp_path / "events" / "rank-1.jsonl"

    def twice() -> None:
        signal_later(signal.SIGINT, when=events).join()
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=twice, daemon=True)
    thread.start()
    with pytest.raises(StoppedError, match="stopped at once"):
        job.launch()
    thread.join()


def test_a_restart_goes_on(tmp_path: Path) -> None:
    job = work(tmp_path, "fail_once")
    assert job.launch(max_restarts=1).restarts == 1
    assert "all start anew (restart 1)" in job.output
    assert (tmp_path / "sum-1").read_text() == "3"
    assert (tmp_path / "logs" / "1" / "error.1.json").exists()


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OptionError, match="cannot be used"):
            work(tmp_path, "add_up").launch(APPORTION_PORT=str(taken.getsockname()[1]))
    assert not (tmp_path / "logs").exists()


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    job = work(tmp_path, "step_until_stopped")
    code = (
        "import sys; from pathlib import Path; from apportion.launching import launch\n"
        "task = Path(sys.argv[-1])\n"
        f"launch(task, num_ranks=2, log_dir=task.parent / 'logs', env={ENV!r}, program='rank_programs')\n"
    )
    script = tmp_path / "launcher.py"
    script.write_text(code)
    parent = subprocess.Popen([sys.executable, str(script), str(job.task)])
    wait_for_steps(job)
    parent.kill()
    parent.wait()
    end = time.monotonic() + STOP_SECONDS
    while job.processes() and time.monotonic() < end:
        time.sleep(0.1)
    assert job.processes() == []
