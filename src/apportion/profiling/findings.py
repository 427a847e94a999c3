"""What the probe found: the one-device truth of a small batch, and how its parts count exactly."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..batching import Dims
from ..batching.forward import Functions, PartRule
from ..records import Traits
from .rounding import Gradients, relative_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """The one-device result of one forward and backward over `batch`.

    `floors` gives for each gradient the norm under which a difference is rounding (see Note [Rounding]);
    `loss_floor` the same for the loss.
    """

    batch: Any
    loss: float
    gradients: Gradients
    buffers: dict[str, torch.Tensor]
    floors: dict[str, float] = field(default_factory=dict)
    loss_floor: float = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The traits, and what the steps need that has no JSON form.

    `sites` maps (module, n-th draw) to the dimension of the batch; `drawing` names the modules that draw.
    """

    traits: Traits
    rule: PartRule
    functions: Functions
    dims: Dims
    sites: dict[tuple[str, int], int | None] = field(default_factory=dict)
    drawing: tuple[str, ...] = ()
    single_loss: bool = False
    truth: Truth | None = None


def worst_error(gradients: Gradients, truth: Truth) -> tuple[float, str]:
    """Return the largest relative error of a gradient and its name."""
    expected = truth.gradients
    errors = {n: relative_error(gradients.get(n), expected[n], truth.floors.get(n, 0.0)) for n in expected}
    name = max(errors, key=errors.__getitem__, default="")
    return errors.get(name, 0.0), name
