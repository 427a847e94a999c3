"""What a small real run told about a model's answer: which exact ways of splitting its batch exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class LossKind(Enum):
    """The exact way to take the loss of a batch whose samples live on several ranks.

    MEAN         a per-sample mean: averaged over ranks, weighted by samples
    TOTAL_COUNT  loss() returns (total, count): both are summed over ranks
    WEIGHTED     means inside torch's losses are taken over the global count (ignored tokens, class weights)
    GATHER       outputs are gathered with gradient; the loss is taken over the whole batch on every rank
    """

    MEAN = "mean"
    TOTAL_COUNT = "total_count"
    WEIGHTED = "weighted"
    GATHER = "gather"


class BufferRule(Enum):
    """How the one-device value of a buffer that forward changes follows from the parts' values."""

    SAME = "same"
    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why no split of the batch keeps the answer, and the way out."""

    reason: str
    found: str = ""
    try_: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """The findings of the probe.

    `buffers` has an entry for each buffer that forward changes. `draws` says that forward takes random
    numbers, `batch_norm` that statistics of the batch are used, `conditional` that the set of parameters in
    use depends on the data, `accumulates` that several micro-batches per step stay exact, `two_pass` that
    they need a first forward without gradients. `forward_only` holds the fqns of modules whose parameters
    are used only inside their own forward.
    """

    loss: LossKind = LossKind.MEAN
    buffers: Mapping[str, BufferRule] = field(default_factory=dict)
    draws: bool = False
    batch_norm: bool = False
    conditional: bool = False
    accumulates: bool = True
    two_pass: bool = False
    forward_only: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    sparse: tuple[str, ...] = ()
    refusal: Refusal | None = None
    notes: tuple[str, ...] = ()
