"""Where ranks' output goes: `logs/RANK/{stdout,stderr}.log`, earlier ones kept beside; the agent's own log."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import final

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std

AGENT_LOGGER = "torch.distributed.elastic"


@final
class RankLogs(LogsSpecs):
    """Tells PyTorch's agent which files and which environment each rank gets."""

    def __init__(self, log_dir: Path, env: Mapping[str, str]) -> None:
        super().__init__(str(log_dir), redirects=Std.ALL)
        self.log_dir = log_dir
        self.env = dict(env)

    @property
    def root_log_dir(self) -> str:
        return str(self.log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files of the ranks that are about to start, and complete their environments."""
        destination = LogsDest()
        for local_rank, env in envs.items():
            folder = self.log_dir / str(local_rank)
            folder.mkdir(parents=True, exist_ok=True)
            for stream in ("stdout.log", "stderr.log", "error.json"):
                _keep(folder / stream)
            destination.stdouts[local_rank] = str(folder / "stdout.log")
            destination.stderrs[local_rank] = str(folder / "stderr.log")
            destination.error_files[local_rank] = str(folder / "error.json")
            env["TORCHELASTIC_ERROR_FILE"] = str(folder / "error.json")
            env.update(self.env)
        return destination


def _keep(path: Path) -> None:
    """Rename a file of an earlier start to the first free `NAME.1.SUFFIX`, `NAME.2.SUFFIX`, …"""
    if not path.exists():
        return
    number = 1
    while (kept := path.with_suffix(f".{number}{path.suffix}")).exists():
        number += 1
    path.rename(kept)


@contextmanager
def agent_log(path: Path) -> Iterator[None]:
    """Send what PyTorch's agent logs to a file instead of the terminal while the block runs."""
    logger = logging.getLogger(AGENT_LOGGER)
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    propagate = logger.propagate
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        handler.close()
