"""The run directory: whose it is, and whether a run in it is taken up again or set aside."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

from ..errors import OptionError
from ..records import Job, Plan, from_json_text, to_json_text

# What the launcher of the present run has already opened; it stays when a run is set aside.
PRESENT = frozenset({"logs", "events", "task.json", "result.json"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """A run directory that is ours; `changed` names what differs from the run that is resumed."""

    path: Path
    resumes: bool
    changed: tuple[str, ...] = ()


def claim_run_dir(job: Job, plan: Plan | None, *, fingerprint: str, resume: bool) -> Claimed:
    """Make the job's run directory ours: write `job.json` and `plan.json`, or find that it is resumed.

    A run that is there and not to be resumed is moved into `previous-N/` inside. Rank 0 calls this.

    Raises: OptionError if the directory belongs to another job or cannot be written; nothing is changed then.
    """
    path = Path(job.run_dir)
    there = path / "job.json"
    resumes = False
    changed: tuple[str, ...] = ()
    if there.exists():
        if resume:
            changed = _changes(from_json_text(Job, there.read_text()), job, fingerprint, path)
            resumes = True
        else:
            _set_aside(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        write_atomically(there, to_json_text(dataclasses.replace(job, fingerprint=fingerprint)))
        if plan is not None:
            write_atomically(path / "plan.json", to_json_text(plan))
    except OSError as error:
        raise OptionError(
            f"cannot write to the run directory {path}", found=str(error), try_="choose another with --run-dir"
        ) from error
    return Claimed(path=path, resumes=resumes, changed=changed)


def _changes(before: Job, job: Job, fingerprint: str, path: Path) -> tuple[str, ...]:
    """Return what differs without making it another job.

    Raises: OptionError if it is another one: target or model options differ.
    """
    same_file = before.target == job.target or (fingerprint and before.fingerprint == fingerprint)
    rows = [
        ("target", before.target, before.target if same_file else job.target),
        ("--set", dict(before.overrides), dict(job.overrides)),
        ("--seq-len", before.seq_len, job.seq_len),
    ]
    for name, old, new in rows:
        if old != new:
            raise OptionError(
                f"the run directory {path} belongs to another job",
                found=f"its {name} is {old}, not {new}",
                try_="--run-dir with another name, or --resume off to set the run that is there aside",
            )
    if before.fingerprint and fingerprint and before.fingerprint != fingerprint:
        return (f"{job.target} has changed since this run began",)
    return ()


def _set_aside(path: Path) -> None:
    number = 1
    while (previous := path / f"previous-{number}").exists():
        number += 1
    previous.mkdir()
    for entry in path.iterdir():
        if entry.name not in PRESENT and not entry.name.startswith("previous-"):
            entry.rename(previous / entry.name)


def write_atomically(path: Path, text: str) -> None:
    """Put a file in place whole, or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
