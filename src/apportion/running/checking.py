"""The first-step check: this plan's gradients of a small batch against those of one device, before any step."""

from __future__ import annotations

import math

import torch

from ..batching import ModuleState, buffers_of
from ..profiling.findings import Findings
from ..profiling.rounding import tolerance_of
from ..records import Parity, ParityErrors, ParityStatus, Precision, Worst
from .engine import Engine
from .gradients import Compared, compare, tied_names, whole_gradients
from .portions import share_of_batch
from .stats import StepStats, exchange_stats


def tolerance_for(findings_tolerance: float, precision: Precision) -> float:
    """Return the bound on relative errors: the weights' type, or eight units of the arithmetic's type."""
    coarse = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}.get(precision)
    eps = 8 * torch.finfo(coarse).eps if coarse is not None else 0.0
    return max(findings_tolerance, eps, 8 * 2.0**-11 if precision is Precision.TF32 else 0.0)


def first_step_check(
    engine: Engine, findings: Findings, ties: tuple[tuple[str, ...], ...], *, precision: Precision
) -> Parity:
    """Run the probed batch through the plan and compare loss, gradients and buffers; nothing is stepped.

    Collective. Returns a Parity that is EQUAL or WRONG with the cause named.
    """
    truth = findings.truth
    assert truth is not None
    applied, place = engine.applied, engine.place
    tolerance = tolerance_for(tolerance_of(applied.model), precision)
    state = ModuleState.capture(applied.model)
    share = share_of_batch(
        truth.batch,
        findings.dims,
        rank=place.rank,
        num_ranks=place.num_ranks,
        num_micro_batches=applied.candidate.grad_accumulation,
        device=place.device,
    )
    passed = engine.run(share, 0)
    stats = exchange_stats(
        StepStats(value=passed.value, samples=passed.samples, checksum=share.checksum), place
    )
    values = whole_gradients(applied.model)
    if passed.correction != 1.0:
        values = {n: None if g is None else g * passed.correction for n, g in values.items()}
    on_device = {n: None if g is None else g.to(place.device) for n, g in truth.gradients.items()}
    gradients = compare(values, on_device, floors=truth.floors)
    buffers = compare(
        dict(buffers_of(applied.model)), {n: b.to(place.device) for n, b in truth.buffers.items()}
    )
    loss_error = abs(stats.loss - truth.loss) / max(abs(truth.loss), truth.loss_floor)
    applied.optimizer.zero_grad(set_to_none=True)
    state.restore(applied.model)
    errors = ParityErrors(loss=loss_error, gradients=gradients.error, buffers=buffers.error)
    reason = ""
    if tied_names(applied.model) != ties:
        reason = "a tied weight came apart: " + ", ".join(" = ".join(group) for group in ties)
    elif stats.samples != share.total:
        reason = f"a micro-batch was skipped: {stats.samples} of {share.total} samples were run"
    elif max(gradients.error, loss_error) > tolerance or math.isnan(loss_error):
        reason = diagnose(gradients, loss_error)
    elif buffers.error > tolerance:
        reason = (
            f"buffer '{buffers.worst.name}' is stale: rank {buffers.worst.rank} lacks the global batch's value"
        )
    worst = buffers.worst if buffers.error > max(gradients.error, tolerance) else gradients.worst
    return Parity(
        status=ParityStatus.WRONG if reason else ParityStatus.EQUAL,
        reason=reason,
        relative_error=errors,
        worst=worst if worst.name else Worst(name="loss"),
        tolerance=tolerance,
        strategy=applied.candidate.strategy.value,
        world_size=place.num_ranks,
        notes=findings.traits.notes,
    )


def diagnose(gradients: Compared, loss_error: float) -> str:
    """Say in words what kind of fault the errors look like."""
    where = f"gradient of '{gradients.worst.name}' on rank {gradients.worst.rank}"
    if gradients.spread:
        return f"{where} is off by {gradients.error:.1e} and ranks disagree: an all-reduce is missing"
    if not math.isnan(gradients.ratio) and abs(gradients.ratio - 1) > 1e-4:
        return f"{where}: all gradients are {gradients.ratio:.4g} times too large: a wrong scale"
    if gradients.error <= loss_error:
        return f"the loss is off by {loss_error:.1e}"
    return f"{where} is off by {gradients.error:.1e}: part of the batch is missing or counted twice"
