"""The resolved options of one piece of work. What the user's functions return is not part of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .plan import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to work on, on which devices, and how far. Saved as `job.json` in the run directory.

    `batch_size` is the global batch in samples. `steps` wins over `epochs` where both are given.
    `overrides` are the `--set name=value` pairs; `versions` the Python and library versions at the start;
    `fingerprint` stands for the source of the target when the run began.
    """

    target: str
    devices: str = "local"
    plan: str = "auto"
    engine: str = "local"
    batch_size: int = 32
    seq_len: int | None = None
    steps: int | None = None
    epochs: int = 1
    seed: int = 0
    lr: float | None = None
    optimizer: str = "adamw"
    clip_norm: float | None = None
    validate_every: int = 0
    save_every: int = 0
    keep_checkpoints: int = 2
    log_every: int = 10
    num_workers: int = 0
    compile: bool = False
    check_first_step: bool = True
    run_dir: str = "runs/default"
    resume: bool = True
    limits: Limits = field(default_factory=Limits)
    overrides: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    fingerprint: str = ""
