"""How much of a difference between two runs is rounding.

Note [Rounding]
How much of a difference is rounding depends on the model: a deep stack of sines multiplies it a hundredfold.
So the truth is run a second time with every weight moved by one rounding unit. A backward stable computation
gives the exact result for inputs changed by a few units (Higham 2002, section 1.5); eight times that change
is taken as rounding. A gradient that is mathematically zero (a bias before batch-norm) is all rounding: eight
units of the largest gradient per element are allowed for it.
"""

from __future__ import annotations

import torch
from torch import nn

Gradients = dict[str, torch.Tensor | None]


def tolerance_of(model: nn.Module) -> float:
    """Return the relative L2 error per tensor that counts as equal for the model's coarsest floating type.

    float64 1e-9 and float32 1e-5 are the contract; lower precision allows 8 units in the last place.
    """
    dtypes = {p.dtype for p in model.parameters() if p.dtype.is_floating_point} or {torch.float32}
    return max({torch.float64: 1e-9, torch.float32: 1e-5}.get(d, 8 * torch.finfo(d).eps) for d in dtypes)


def relative_error(value: torch.Tensor | None, truth: torch.Tensor | None, floor: float = 0.0) -> float:
    """Return the relative L2 error; `floor` is the norm below which a tensor counts as rounding noise."""
    if value is None or truth is None:
        other = value if truth is None else truth
        return 0.0 if other is None or not bool(dense(other).any()) else float("inf")
    a, b = dense(value).double(), dense(truth).double()
    if a.shape != b.shape:
        return float("inf")
    difference = float((a - b).norm())
    if difference != difference:
        return 0.0 if torch.equal(a.isnan(), b.isnan()) and bool(a.isnan().any()) else float("inf")
    return difference / max(float(b.norm()), floor, 1e-300) if difference else 0.0


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` without gradient, and not sparse."""
    tensor = tensor.detach()
    return tensor.to_dense() if tensor.is_sparse else tensor


def noise_floor(gradients: Gradients, tolerance: float) -> dict[str, float]:
    """Return for each gradient the norm under which differences are rounding of the largest gradient.

    A gradient that is mathematically zero (a bias before batch-norm) is the rounding left over when terms as
    large as the other gradients cancel.
    Model: 8 eps / tolerance * (largest root mean square of a gradient) * sqrt(elements), so that an error of
    `tolerance` against it is eight rounding units of the largest gradient per element.
    """
    known = {name: dense(g) for name, g in gradients.items() if g is not None and g.numel()}
    rms = max((float(g.double().norm()) / g.numel() ** 0.5 for g in known.values()), default=0.0)
    return {
        name: 8 * torch.finfo(g.dtype).eps / tolerance * rms * g.numel() ** 0.5
        if g.is_floating_point()
        else 0.0
        for name, g in known.items()
    }
