"""Look at this machine and judge what is found."""

from __future__ import annotations

from pathlib import Path

from ..records import MachineCheck
from .checks import check_facts
from .facts import look


def check_machine(*, port: int | None = None, run_dir: Path = Path("runs")) -> tuple[MachineCheck, ...]:
    """Return the checks of this machine; `port` is one that must be free, `run_dir` where runs will be kept."""
    return check_facts(look(port=port, run_dir=run_dir))
