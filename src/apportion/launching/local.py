"""Start the ranks on this host through PyTorch's elastic launcher, and stay with them to the end."""

from __future__ import annotations

import os
import signal
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..errors import ApportionError, OptionError, RankError, StoppedError
from ..records import Event, Phase, StepRecord
from .failures import Ended, error_of, failure_in, first_ended
from .logs import RankLogs, agent_log
from .network import LOOPBACK, check_port, gloo_interface
from .outcome import Outcome, Tick
from .stopping import StopRequest, stop_signals
from .watch import Lines, Tail, behind, is_alive, kill_groups, place_of, send, started_ranks

name = "local"

TICK_SECONDS = 0.1
# From the first failure to the end of every other rank: 5 s are promised, one is left for noticing.
GRACE_SECONDS = 4.0
# The process group's own default in torch.distributed for gloo (default_pg_timeout, torch 2.13): 30 minutes.
STEP_TIMEOUT_SECONDS = 1800.0


def launch(
    task: Path,
    *,
    num_ranks: int,
    log_dir: Path,
    env: Mapping[str, str],
    max_restarts: int = 0,
    on_tick: Callable[[Tick], None] | None = None,
    program: str = "apportion.rank",
) -> Outcome:
    """Run `python -m PROGRAM TASK` on `num_ranks` processes of this host and return when all ended.

    `env` is added to the ranks' environment. In it (or in `os.environ`) `APPORTION_STEP_TIMEOUT` gives the
    seconds that a rank may take for one step, `APPORTION_PORT` a port to meet on. Output goes to
    `log_dir/RANK/{stdout,stderr}.log`, events to `log_dir/../events/`. `on_tick` gets what happened about ten
    times a second; without it the output of rank 0 goes to stderr.

    Raises: the ApportionError that a rank raised; RankError for any other end of a rank (the traceback of the
    rank that failed first is put out before), StoppedError where a stop was asked for and nothing was saved.
    """
    settings = {**os.environ, **env}
    timeout_seconds = _positive(settings, "APPORTION_STEP_TIMEOUT", STEP_TIMEOUT_SECONDS)
    port = int(_positive(settings, "APPORTION_PORT", 0))
    check_port(port)
    events_dir = log_dir.parent / "events"
    events_dir.mkdir(parents=True, exist_ok=True)
    rank_env = _rank_env(settings, num_ranks, events_dir) | dict(env)
    config = _config(num_ranks, RankLogs(log_dir, rank_env), port, max_restarts)
    request = StopRequest()
    group = _Group(task, num_ranks, log_dir, request, timeout_seconds)
    started = time.monotonic()
    with agent_log(log_dir / "launcher.log"), stop_signals(request), ThreadPoolExecutor(1) as executor:
        agent = executor.submit(elastic_launch(config, sys.executable), "-m", program, str(task))
        _follow(agent, group, on_tick or _to_stderr)
    return Outcome(
        backend=name,
        num_ranks=num_ranks,
        seconds=time.monotonic() - started,
        restarts=max((event.attempt for event in group.latest.values()), default=0),
        log_dir=log_dir,
        stop_requested=request.save,
    )


def _config(num_ranks: int, logs: RankLogs, port: int, max_restarts: int) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        logs_specs=logs,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOOPBACK}:{port}",
        rdzv_configs={"is_host": "true"},
        local_addr=LOOPBACK,
        max_restarts=max_restarts,
        monitor_interval=TICK_SECONDS,
        shutdown_timeout=int(GRACE_SECONDS),
    )


def _rank_env(settings: Mapping[str, str], num_ranks: int, events_dir: Path) -> dict[str, str]:
    """Return what ranks need in their environment; what the user has set stays."""
    cores = len(os.sched_getaffinity(0))
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // num_ranks)),
        # cuBLAS is deterministic with this workspace only (cuBLAS documentation, "Results reproducibility").
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONUNBUFFERED": "1",
        # DDP warns in C++ where parameters that may go unused happen to be used; they are expected to.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    interface = gloo_interface()
    if interface:
        defaults["GLOO_SOCKET_IFNAME"] = interface
    ours = {"APPORTION_LAUNCHER_PID": str(os.getpid()), "APPORTION_EVENTS": str(events_dir)}
    return {key: settings.get(key, value) for key, value in defaults.items()} | ours


def _positive(settings: Mapping[str, str], key: str, default: float) -> float:
    text = settings.get(key, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value <= 0:
        raise OptionError(f"{key} is '{text}'", try_="a number above 0")
    return value


def _to_stderr(tick: Tick) -> None:
    sys.stderr.write(tick.output)
    sys.stderr.flush()


def _follow(agent: Future[Any], group: _Group, on_tick: Callable[[Tick], None]) -> None:
    """Look after the ranks until the agent has ended; raise the error that explains a bad end."""
    try:
        while not agent.done():
            on_tick(group.tick())
            time.sleep(TICK_SECONDS)
        error = agent.exception()
        if error is None:
            on_tick(group.tick())
            return
        shown = group.explain(error)
        on_tick(group.last_tick(shown))
        raise shown from None
    finally:
        group.end(agent)


@final
class _Group:
    """The ranks of one launch: the latest event of each, and what is to be done about them."""

    def __init__(
        self, task: Path, num_ranks: int, log_dir: Path, request: StopRequest, timeout_seconds: float
    ) -> None:
        self.task = task
        self.num_ranks = num_ranks
        self.log_dir = log_dir
        self.request = request
        self.timeout_seconds = timeout_seconds
        self.latest: dict[int, Event] = {}
        self.pids: set[int] = set()
        self.killed: set[int] = set()
        self.hung: RankError | None = None
        self.told: set[int] = set()
        self.failed_at = 0.0
        self.moved_at = time.monotonic()
        events = log_dir.parent / "events"
        self.events = [Lines(events / f"rank-{rank}.jsonl", Event) for rank in range(num_ranks)]
        self.records = Lines(log_dir.parent / "metrics.jsonl", StepRecord)
        first = log_dir / "0"
        self.output = [Tail(first / stream, from_end=True) for stream in ("stdout.log", "stderr.log")]
        self.held = ""
        self.notices: list[str] = []
        self.shown_rank = -1

    def tick(self) -> Tick:
        """Take in what the ranks wrote, act on it, and return it.

        Output is read before deaths are looked for, and held back once a rank has failed: the complaints of
        the others come after the cause.
        """
        text = "".join(tail.read() for tail in self.output)
        dead = {event.pid for event in self.latest.values() if not is_alive(event.pid)}
        events = self._new_events()
        for event in events:
            self._take(event)
        self._judge(dead)
        self._act_on_request()
        self._look_for_hang()
        notices, self.notices = "".join(self.notices), []
        if self.failed_at:
            self.held += text
            text = ""
        return Tick(events=events, records=self.records.read(), output=text + notices)

    def _new_events(self) -> tuple[Event, ...]:
        return tuple(event for lines in self.events for event in lines.read())

    def _take(self, event: Event) -> None:
        before = self.latest.get(event.rank)
        if before is None or before.pid != event.pid:
            self.pids.add(event.pid)
            if event.attempt and self.failed_at:
                self.failed_at, self.held = 0.0, ""
                self.notices.append(
                    f"a rank failed; all start anew (restart {event.attempt}); "
                    f"what it said is in {self.log_dir}/*/error.*.json\n"
                )
        self.latest[event.rank] = event
        self.moved_at = time.monotonic()

    def _judge(self, dead: set[int]) -> None:
        attempt = max((event.attempt for event in self.latest.values()), default=0)
        failed = [
            event
            for event in self.latest.values()
            if event.attempt == attempt  # the others are those of ranks that have not started anew yet
            and (not event.ok if event.phase is Phase.END else event.pid in dead)
        ]
        if failed and not self.failed_at:
            self.failed_at = time.monotonic()
        if self.failed_at and time.monotonic() - self.failed_at > GRACE_SECONDS:
            self._kill(event.pid for event in self.latest.values() if is_alive(event.pid))

    def _act_on_request(self) -> None:
        if self.request.at_once:
            self._kill(started_ranks(self.task))
        elif self.request.save:
            ready = {event.pid for event in self.latest.values()} - self.told
            if ready and not self.told:
                self.notices.append(
                    "stopping: the ranks save after this step (Ctrl-C again ends them at once)\n"
                )
            send(ready, signal.SIGUSR1)
            self.told |= ready

    def _look_for_hang(self) -> None:
        since = time.monotonic() - self.moved_at
        if self.hung is not None or self.failed_at or since < self.timeout_seconds:
            return
        late = behind(self.latest, self.num_ranks)
        names = ", ".join(str(rank) for rank in late)
        places = "; ".join(
            f"rank {rank} {place_of(self.latest.get(rank))}" for rank in range(min(self.num_ranks, 8))
        )
        logs = self.log_dir / str(late[0] if late else 0) / "stderr.log"
        self.hung = RankError(
            f"no rank went on for {since:.0f} s; behind {'are ranks' if len(late) > 1 else 'is rank'} {names}",
            found=places,
            try_=f"the stacks of their threads are in {logs}; a longer --timeout for slow steps",
        )
        send([self.latest[rank].pid for rank in late if rank in self.latest], signal.SIGUSR2)
        time.sleep(TICK_SECONDS)  # for the stacks to be written
        self._kill(started_ranks(self.task))

    def _kill(self, pids: Any) -> None:
        chosen = set(pids)
        self.killed |= chosen
        kill_groups(chosen)

    def explain(self, error: BaseException) -> BaseException:
        """Return the error to show for what ended the agent."""
        if self.hung is not None:
            return self.hung
        if self.request.at_once:
            return StoppedError(
                "stopped at once on request", found="what came after the last checkpoint is lost"
            )
        if isinstance(error, ChildFailedError):
            return self._explain_ranks(error)
        if isinstance(error, RendezvousError):
            return RankError(
                "the processes could not meet", found=str(error.__cause__ or error), try_="apportion doctor"
            )
        return error

    def _explain_ranks(self, error: ChildFailedError) -> ApportionError:
        first = self.first_ended(error)
        if self.request.save and first.order[0] >= 3:
            return StoppedError("stopped on request", found="training had not begun, so nothing was saved")
        self.shown_rank = first.rank
        event = self.latest.get(first.rank)
        return error_of(first, place=place_of(event) if event is not None else "")

    def first_ended(self, error: ChildFailedError) -> Ended:
        return first_ended(
            Ended(
                rank=rank,
                exit_code=failure.exitcode,
                said=failure_in(failure.error_file_data),
                log=self.log_dir / str(rank) / "stderr.log",
                ended_by_us=failure.pid in self.killed,
            )
            for rank, failure in error.failures.items()
        )

    def last_tick(self, shown: BaseException) -> Tick:
        """Return what is left to put out: the last words of rank 0 if it failed first, and the traceback."""
        words = self.held + "".join(tail.read() for tail in self.output) if self.shown_rank == 0 else ""
        notes = "".join(getattr(shown, "__notes__", []))
        return Tick(events=self._new_events(), records=self.records.read(), output=words + notes)

    def end(self, agent: Future[Any]) -> None:
        """Make sure that nothing is left running, whatever ended the launch."""
        while not agent.done():
            self._kill(started_ranks(self.task))
            time.sleep(TICK_SECONDS)
        kill_groups(self.pids)
