"""How much of a difference between two runs is rounding.

Note [Rounding]
How much of a difference is rounding depends on the model: a deep stack of sines multiplies it a hundredfold.
So the truth is run a second time with every weight moved by one rounding unit. A backward stable computation
gives the exact result for inputs changed by a few units (Higham 2002, section 1.5); eight times that change
is taken as rounding. A gradient that is mathematically zero (a bias before batch-norm) is all rounding: eight
units of the largest gradient per element are allowed for it. What a unit changes by more than a thousandth is
not rounding but a jump (a sign, a threshold), and earns no allowance beyond that.
"""

from __future__ import annotations

import torch
from torch import nn

Gradients = dict[str, torch.Tensor | None]

AMPLIFIED = 1e-3  # the relative change up to which a difference may be rounding that the model amplifies


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
    a, b = wide(value), wide(truth)
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


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` dense and in double precision, complex numbers as pairs."""
    plain = dense(tensor)
    return (torch.view_as_real(plain) if plain.is_complex() else plain).double()


def noise_floor(gradients: Gradients, tolerance: float) -> dict[str, float]:
    """Return for each gradient the norm under which differences are rounding of the largest gradient.

    A gradient that is mathematically zero (a bias before batch-norm) is the rounding left over when terms as
    large as the other gradients cancel.
    Model: 8 eps / tolerance * (largest root mean square of a gradient) * sqrt(elements), so that an error of
    `tolerance` against it is eight rounding units of the largest gradient per element.
    """
    known = {name: dense(g) for name, g in gradients.items() if g is not None and g.numel()}
    rms = max((float(wide(g).norm()) / g.numel() ** 0.5 for g in known.values()), default=0.0)
    return {
        name: 8 * torch.finfo(g.dtype).eps / tolerance * rms * g.numel() ** 0.5
        if g.is_floating_point() or g.is_complex()
        else 0.0
        for name, g in known.items()
    }


def moved_floor(change: float, size: float, floor: float, tolerance: float) -> float:
    """Return the norm under which differences are rounding, where one unit in the weights makes `change`.

    `size` is the norm of what is compared or of what cancels in it, `floor` its noise floor.
    """
    return max(floor, min(8 * change, max(AMPLIFIED, 8 * tolerance) * size) / tolerance)


def cancelled_size(gradient: torch.Tensor, floor: float, tolerance: float) -> float:
    """Return the norm of `gradient`, or of the largest one scaled to its elements (see noise_floor)."""
    return max(float(wide(gradient).norm()), floor * tolerance / (8 * torch.finfo(gradient.dtype).eps))
