"""Open a session: probe the model, apply the plan, check the first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..applying import apply, block_names, broadcast_state, check_module, check_parameters, make_optimizer
from ..batching import Dims, find_dims, loss_function, map_tensors, spread_samples
from ..batching.forward import Functions
from ..errors import OptionError, ParityError, PlanError
from ..profiling.findings import Findings
from ..profiling.probe import Probe
from ..profiling.rounding import tolerance_of
from ..reading import JobParts
from ..records import Candidate, Job, ParityStatus, Precision
from .checking import first_step_check, tolerance_for
from .engine import Place
from .gradients import tied_names
from .session import Session, SessionSettings

PROBE_SAMPLES = 8
LARGE_MODEL = 50_000_000  # parameters from which the probe takes no more samples than a micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What a session is opened with beside the model and the candidate."""

    functions: Functions
    example: Any
    dims: Dims | None = None
    optimizer: Optimizer
    schedule: Any = None
    settings: SessionSettings = field(default_factory=SessionSettings)
    compile: bool = False
    check: bool = True


def this_place() -> Place:
    """Return this process's place in the default process group; the side group is made here (collective)."""
    if not dist.is_initialized():
        cuda = torch.cuda.is_available()
        return Place(
            rank=0,
            num_ranks=1,
            device=torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
        )
    on_gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    return Place(rank=dist.get_rank(), num_ranks=dist.get_world_size(), device=device, group=dist.new_group())


def functions_of(forward: Callable[[nn.Module, Any], Any], loss: Callable[..., Any] | None) -> Functions:
    """Return forward and loss in the form that parts are run with."""
    return Functions(forward=forward, loss=loss_function(loss), own_loss=loss is None)


def cast_functions(plain: Functions, precision: Precision, device: torch.device) -> Functions | None:
    """Return forward and loss under the precision's autocast; None where weights' own arithmetic is meant.

    Raises: PlanError for fp8, which torch's autocast does not have.
    """
    if precision is Precision.FP8:
        raise PlanError("fp8 is not available yet", try_="--precision bf16")
    if precision is Precision.TF32:
        torch.set_float32_matmul_precision("high")
    half = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}.get(precision)
    if half is None:
        return None

    def forward(model: nn.Module, batch: Any) -> Any:
        with torch.autocast(device.type, dtype=half, cache_enabled=False):
            return plain.forward(model, batch)

    def loss(output: Any, batch: Any) -> Any:
        with torch.autocast(device.type, dtype=half, cache_enabled=False):
            return plain.loss(output, batch)

    return Functions(forward=forward, loss=loss, own_loss=plain.own_loss)


def open_session(parts: JobParts, job: Job, candidate: Candidate) -> Session:
    """Open a session for a job inside the process group; collective.

    Raises: TargetError, RefusedError, PlanError, ParityError; nothing has been stepped then.
    """
    place = this_place()
    model = parts.model()
    if parts.optimizer is not None:
        optimizer = parts.optimizer(model.parameters())
    else:
        optimizer = make_optimizer(job.optimizer, [p for p in model.parameters() if p.requires_grad], job.lr)
    opening = Opening(
        functions=functions_of(parts.forward, parts.loss),
        example=parts.example(min(job.batch_size, PROBE_SAMPLES)),
        dims=parts.batch_dims,
        optimizer=optimizer,
        schedule=parts.schedule(optimizer) if parts.schedule is not None else None,
        settings=SessionSettings(
            seed=job.seed,
            clip_norm=job.clip_norm,
            batch_size=job.batch_size,
            fingerprint=parts.fingerprint,
            keep_checkpoints=job.keep_checkpoints,
        ),
        compile=job.compile,
        check=job.check_first_step,
    )
    return open_with(model, candidate, opening, place)


def open_with(model: nn.Module, candidate: Candidate, opening: Opening, place: Place) -> Session:
    """Probe, apply and check; collective."""
    check_module(model)
    check_parameters(opening.optimizer, model)
    if isinstance(opening.optimizer, torch.optim.LBFGS):
        raise OptionError(
            "LBFGS needs a closure, which a step over several ranks cannot give it", try_="adamw or sgd"
        )
    if place.num_ranks > 1:
        broadcast_state(model)
    findings = probe(model, opening, candidate, place)
    ties = tied_names(model)
    applied = apply(model, opening.optimizer, candidate, findings.traits, device=place.device)
    session = Session(applied, findings, place, settings=opening.settings, schedule=opening.schedule)
    if opening.check and findings.traits.refusal is None:
        session.parity = first_step_check(session.engine, findings, ties, precision=candidate.precision)
        if session.parity.status is ParityStatus.WRONG:
            raise ParityError(
                f"{candidate.strategy.value} does not give the one-device answer: {session.parity.reason}",
                found=f"worst: '{session.parity.worst.name}' on rank {session.parity.worst.rank}, "
                f"relative errors {session.parity.relative_error}",
                try_="--strategy with another name; nothing was trained",
            )
    if opening.compile:
        compile_model(model, findings, candidate)
    return session


def probe(model: nn.Module, opening: Opening, candidate: Candidate, place: Place) -> Findings:
    """Return the findings on rank 0's example, on this rank's device; every rank finds the same."""
    example, dims = opening.example, opening.dims
    if dims is None:
        dims = find_dims(example)
    large = sum(p.numel() for p in model.parameters()) > LARGE_MODEL
    limit = min(PROBE_SAMPLES, max(2, candidate.micro_batch_size)) if large else PROBE_SAMPLES
    example = spread_samples(example, dims, limit)
    if place.num_ranks > 1:
        box = [example]
        dist.broadcast_object_list(box, 0)
        example = box[0]
    if place.device.type == "cuda":
        model.to(place.device)
        example = map_tensors(lambda t: t.to(place.device), example)
    cast = cast_functions(opening.functions, candidate.precision, place.device)
    shared: Any = {"dims": dims, "seed": opening.settings.seed, "limit": limit}
    findings = Probe(model, example, functions=opening.functions, **shared).run()
    if cast is None:
        return findings
    # How parts count is decided in the weights' own arithmetic; only the truth is that of the coarser one.
    tolerance = tolerance_for(tolerance_of(model), candidate.precision)
    return Probe(model, example, functions=cast, tolerance=tolerance, **shared).retake(findings)


def compile_model(model: nn.Module, findings: Findings, candidate: Candidate) -> None:
    """Compile each block in place (or the model where it has none).

    Raises: OptionError where random numbers or statistics are taken over the global batch, which a compiled
    module would take for itself.
    """
    traits = findings.traits
    if traits.draws or traits.batch_norm or findings.rule.in_model:
        raise OptionError(
            "--compile cannot be kept exact for this model",
            found="it draws random numbers, or takes statistics or a token-weighted loss inside the model",
            try_="train without --compile, or set dropout to 0 and move the loss into loss(output, batch)",
        )
    modules = dict(model.named_modules())
    blocks = [modules[name] for name in block_names(candidate) if name and name in modules]
    for module in blocks or [model]:
        module.compile()
