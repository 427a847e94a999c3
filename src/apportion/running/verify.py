"""Verify a plan: the same steps on one device and under the plan, compared tensor by tensor.

The one-device run is a plain loop over the whole global batch: no wrapper, no exchange, no rule of the probe.
Only random numbers come from the same stream (see batching.draws, Note [Draws]).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import astuple, dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import default_collate

from ..applying import make_optimizer
from ..batching import (
    DrawScope,
    DrawStream,
    Part,
    buffers_of,
    is_total_and_count,
    map_tensors,
    num_samples,
)
from ..batching.losses import check_scalar
from ..errors import ParityError, RefusedError
from ..profiling.rounding import Gradients, noise_floor, tolerance_of, wide
from ..reading import JobParts
from ..records import Candidate, Job, Parity, ParityErrors, ParityStatus, Worst
from .checking import diagnose, tolerance_for
from .data import Loader, LoaderSettings
from .gradients import Compared, compare, gradient_errors, named, tied_names, whole_gradients
from .norms import clip_factor
from .opening import Opening, functions_of, open_with, this_place
from .session import Session, SessionSettings

AMPLIFIED = 1e-2  # the relative error up to which rounding is thought of


@dataclass(slots=True)
class OneDevice:
    """Loss and gradients of every step, and the state after the last one."""

    losses: list[float] = field(default_factory=list)
    gradients: list[Gradients] = field(default_factory=list)
    weights: Gradients = field(default_factory=dict)
    buffers: Gradients = field(default_factory=dict)
    optimizer: Gradients = field(default_factory=dict)


def verify_rank(parts: JobParts, job: Job, candidate: Candidate, steps: int) -> Parity:
    """Return the parity of `candidate` with one device over `steps` optimizer steps; collective.

    Where float32 runs differ by a little more than the tolerance, the comparison is made again in float64: a
    fault stays, rounding that the model amplifies from step to step goes.
    """
    first = _verify(parts, job, candidate, steps)
    worst = max(astuple(first.relative_error))
    if first.status is not ParityStatus.WRONG or worst > AMPLIFIED or not _is_float32(parts):
        return first
    second = _verify(_in_float64(parts), job, candidate, steps)
    if second.status is not ParityStatus.EQUAL:
        return first
    note = f"judged in float64; in float32 '{first.worst.name}' differs by {worst:.1e}, amplified rounding"
    return replace(second, notes=(*second.notes, note))


def _is_float32(parts: JobParts) -> bool:
    with torch.device("meta"):
        kinds = {p.dtype for p in parts.model().parameters() if p.is_floating_point()}
    return kinds == {torch.float32}


def _in_float64(parts: JobParts) -> JobParts:
    def widen(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.double() if leaf.dtype == torch.float32 else leaf

    def collate(items: list[Any]) -> Any:
        return map_tensors(widen, (parts.collate or default_collate)(items))

    return replace(
        parts,
        model=lambda: parts.model().double(),
        example=lambda n: map_tensors(widen, parts.example(n)),
        collate=collate,
    )


def _verify(parts: JobParts, job: Job, candidate: Candidate, steps: int) -> Parity:
    place = this_place()
    batches = list(_batches(parts, job, steps))
    model = parts.model()
    optimizer = _optimizer(parts, job, model)
    opening = Opening(
        functions=functions_of(parts.forward, parts.loss),
        example=batches[0],
        dims=parts.batch_dims,
        optimizer=optimizer,
        schedule=parts.schedule(optimizer) if parts.schedule is not None else None,
        settings=SessionSettings(seed=job.seed, clip_norm=job.clip_norm, batch_size=job.batch_size),
        check=False,
    )
    tolerance = tolerance_for(tolerance_of(model), candidate.precision)
    ties = tied_names(model)
    try:
        session = open_with(model, candidate, opening, place)
    except RefusedError as error:
        return _parity(
            candidate, place.num_ranks, steps, tolerance, status=ParityStatus.REFUSED, reason=str(error)
        )
    session.scale = None  # the plain loop has no loss scale either; a scale only moves the exponents
    try:
        truth = _one_device(parts, job, session, batches)
        return _compare_steps(session, truth, batches, tolerance=tolerance, ties=ties)
    finally:
        session.close()


def _parity(candidate: Candidate, size: int, steps: int, tolerance: float, **fields: Any) -> Parity:
    return Parity(
        strategy=candidate.strategy.value, world_size=size, steps=steps, tolerance=tolerance, **fields
    )


def _optimizer(parts: JobParts, job: Job, model: nn.Module) -> Optimizer:
    """The job's optimizer; SGD with momentum for a one-batch job.

    Adam turns a gradient that is only rounding noise (a bias before batch-norm) into a step of full size.
    """
    if parts.optimizer is not None:
        return parts.optimizer(model.parameters())
    held = [p for p in model.parameters() if p.requires_grad]
    if parts.one_batch and job.optimizer == "adamw" and job.lr is None:
        return SGD(held, lr=0.01, momentum=0.9)
    return make_optimizer(job.optimizer, held, job.lr)


def _batches(parts: JobParts, job: Job, steps: int) -> Iterator[Any]:
    """The global batches of the first steps, the same on every rank."""
    if parts.data is None:
        for _ in range(steps):
            yield parts.example(job.batch_size)
        return
    settings = LoaderSettings(
        batch_size=job.batch_size, micro_batch_size=job.batch_size, seed=job.seed, whole=True
    )
    loader = Loader(parts.data("train"), settings, collate=parts.collate)
    done = 0
    while done < steps:
        for batch in loader:
            yield batch
            done += 1
            if done == steps:
                return


def _one_device(parts: JobParts, job: Job, session: Session, batches: list[Any]) -> OneDevice:
    """Run the steps plainly, from the weights that the session has now (unseeded ranks hold rank 0's)."""
    start = named(session.model.named_parameters())
    start_buffers = named(session.model.named_buffers())
    model = parts.model().to(session.place.device)
    _load(model, start, start_buffers)
    optimizer = _optimizer(parts, job, model)
    schedule = parts.schedule(optimizer) if parts.schedule is not None else None
    scope = DrawScope(model, session.findings.drawing)
    truth = OneDevice()
    for step, batch in enumerate(batches):
        loss = _one_step(session, model, scope, batch, step)
        torch.autograd.backward(loss)
        truth.losses.append(float(loss.detach()))
        truth.gradients.append(whole_gradients(model))
        _clip(model, job.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if schedule is not None:
            schedule.step()
    scope.remove()
    truth.weights, truth.buffers = named(model.named_parameters()), dict(buffers_of(model))
    truth.optimizer = _moments(model, optimizer)
    return truth


def _load(model: nn.Module, weights: Gradients, buffers: Gradients) -> None:
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            value = weights.get(name, buffers.get(name))
            if value is not None:
                tensor.copy_(value)


def _one_step(session: Session, model: nn.Module, scope: DrawScope, batch: Any, step: int) -> torch.Tensor:
    functions, dims = session.findings.functions, session.findings.dims
    total = num_samples(batch, dims)
    part = Part(start=0, stop=total, total=total)
    stream = DrawStream(seed=session.settings.seed, step=step, part=part, sites=session.findings.sites)
    with scope.drawing_from(stream) if session.traits.draws else nullcontext():
        made = functions.loss(functions.forward(model, batch), batch)
    if is_total_and_count(made):
        ratio: torch.Tensor = made[0] / made[1]
        return ratio
    return check_scalar(made)


def _clip(model: nn.Module, limit: float | None) -> None:
    if limit is None:
        return
    held = [p.grad for p in model.parameters() if p.grad is not None]
    norm = float(torch.linalg.vector_norm(torch.stack([g.norm() for g in held])))
    for g in held:
        g.mul_(clip_factor(norm, limit))


def _moments(model: nn.Module, optimizer: Optimizer) -> Gradients:
    names = {id(p): name for name, p in model.named_parameters()}
    return named(
        (f"{names[id(p)]}.{key}", value)
        for p, state in optimizer.state.items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    )


def _compare_steps(
    session: Session,
    truth: OneDevice,
    batches: list[Any],
    *,
    tolerance: float,
    ties: tuple[tuple[str, ...], ...],
) -> Parity:
    found: list[Gradients] = []
    session.watch = lambda factor: found.append(_scaled(whole_gradients(session.model), factor))
    loss_error, gradients = 0.0, Compared(error=0.0, worst=Worst())
    try:
        for step, batch in enumerate(batches):
            result = session.step(batch)
            expected = truth.losses[step]
            loss_error = max(loss_error, abs(result.loss - expected) / max(abs(expected), 1e-12))
            now = gradient_errors(found[step], truth.gradients[step], tolerance)
            gradients = now if now.error > gradients.error else gradients
    except ParityError as error:
        verdict = {"status": ParityStatus.WRONG, "reason": str(error)}
        return _parity(session.candidate, session.world_size, len(batches), tolerance, **verdict)
    return _verdict(session, truth, gradients, loss_error, tolerance=tolerance, ties=ties)


def _scaled(gradients: Gradients, factor: float) -> Gradients:
    return {name: None if g is None else g * factor for name, g in gradients.items()}


def _noise_only(truth: OneDevice, tolerance: float) -> frozenset[str]:
    """Parameters whose one-device gradient was nothing but rounding in some step.

    A normalising optimizer (Adam) makes steps of full size from such a gradient, in a direction that the
    order of summation decides; their weights have no one-device value to be compared with.
    """
    names: set[str] = set()
    for gradients in truth.gradients:
        floors = noise_floor(gradients, tolerance)
        for name, g in gradients.items():
            if g is not None and float(wide(g).norm()) <= 10 * tolerance * floors.get(name, 0.0):
                names.add(name)
    return frozenset(names)


def _verdict(
    session: Session,
    truth: OneDevice,
    gradients: Compared,
    loss_error: float,
    *,
    tolerance: float,
    ties: tuple[tuple[str, ...], ...],
) -> Parity:
    noise = _noise_only(truth, tolerance)
    noisy = noise if _normalises(session.optimizer) else frozenset()
    kept = {n: w for n, w in truth.weights.items() if n not in noisy}
    mine = {n: w for n, w in named(session.model.named_parameters()).items() if n in kept}
    weights = compare(mine, kept, floors=noise_floor(kept, tolerance))
    buffers = compare(dict(buffers_of(session.model)), truth.buffers, floors=_floors(truth.buffers, tolerance))
    moments = {n: m for n, m in _moments(session.model, session.optimizer).items() if _owner(n) not in noise}
    expected = {n: m for n, m in truth.optimizer.items() if n in moments}
    optimizer = compare(moments, expected, floors=_floors(expected, tolerance))
    errors = ParityErrors(
        loss=loss_error,
        gradients=gradients.error,
        weights=weights.error,
        buffers=buffers.error,
        optimizer=optimizer.error,
    )
    reason = _reason(session, errors, gradients, tolerance=tolerance, ties=ties)
    worst = max((gradients, weights, buffers, optimizer), key=lambda c: c.error).worst
    notes = session.traits.notes
    if noisy:
        notes += (
            f"gradients of {', '.join(sorted(noisy)[:4])} are rounding only; their weights were not compared",
        )
    return _parity(
        session.candidate,
        session.world_size,
        len(truth.losses),
        tolerance,
        status=ParityStatus.WRONG if reason else ParityStatus.EQUAL,
        reason=reason,
        relative_error=errors,
        worst=worst,
        notes=notes,
    )


def _floors(tensors: Gradients, tolerance: float) -> dict[str, float]:
    """The noise floors of tensors, each among those with the same last name (exp_avg, running_mean)."""
    floors: dict[str, float] = {}
    for kind in {name.rpartition(".")[2] for name in tensors}:
        floors |= noise_floor({n: t for n, t in tensors.items() if n.rpartition(".")[2] == kind}, tolerance)
    return floors


def _owner(moment: str) -> str:
    return moment.rpartition(".")[0]


def _normalises(optimizer: Optimizer) -> bool:
    return not isinstance(optimizer, SGD)


def _reason(
    session: Session,
    errors: ParityErrors,
    gradients: Compared,
    *,
    tolerance: float,
    ties: tuple[tuple[str, ...], ...],
) -> str:
    if tied_names(session.model) != ties:
        return "a tied weight came apart: " + ", ".join(" = ".join(group) for group in ties)
    if not max(errors.gradients, errors.loss) <= tolerance:
        return diagnose(gradients, errors.loss)
    for what in ("weights", "buffers", "optimizer"):
        if not getattr(errors, what) <= tolerance:
            cause = "a buffer is stale" if what == "buffers" else f"{what} differ after equal gradients"
            return f"{cause}: off by {getattr(errors, what):.1e}"
    return ""
