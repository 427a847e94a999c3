"""`apportion.parallelize`: an ordinary loop of the user's own, on several devices by a handful of lines."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..applying import make_optimizer
from ..batching import find_dims, loss_function, num_samples
from ..costing import OPTIMIZERS
from ..describing import describe
from ..errors import OptionError, PlanError
from ..planning import make_plan
from ..profiling import profile_module
from ..reading.calling import default_forward
from ..records import Candidate, DeviceType, Limits, Plan, Precision, Strategy, from_json_text
from .group import make_repeatable
from .opening import Opening, functions_of, open_with, this_place
from .session import Session, SessionSettings
from .together import on_first_rank

PlanChoice = str | Plan | Candidate


def parallelize(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    loss: Callable[..., Any] | None = None,
    example: Any,
    plan: PlanChoice = "auto",
    forward: Callable[[nn.Module, Any], Any] | None = None,
    schedule: Any = None,
    batch_dims: tuple[int | None, ...] | None = None,
    batch_size: int | None = None,
    devices: str | None = None,
    seed: int = 0,
    clip_norm: float | None = None,
    precision: str = "fp32",
    compile: bool = False,
    check: bool = True,
) -> Session:
    """Return a session that trains `model` by a plan, such that the answer is that of one device.

    Call it on every rank: under `torchrun script.py`, or alone in one process. `example` is one global batch.
    `loss(output, batch)` returns a per-sample mean or (total, count); leave it out where the model computes
    its own. `plan` is "auto", a strategy's name, the path of a plan.json, a Plan or a Candidate. The optimizer
    keeps its groups, settings and state; `schedule` is a scheduler of it. `batch_dims` names the batch
    dimension of each leaf of a batch where it cannot be found. `batch_size` is the global batch that steps
    will have, that of the example if not given.

    Raises: TargetError, OptionError; RefusedError where no exact split exists; ParityError where the first
    step differs from one device. Nothing has been stepped then.
    """
    _join()
    place = this_place()
    held = optimizer or make_optimizer("adamw", [p for p in model.parameters() if p.requires_grad], None)
    run_forward = forward or default_forward
    dims = batch_dims or find_dims(example)
    size = batch_size or num_samples(example, dims)
    chosen_precision = _precision(precision)
    limits = Limits(batch_size=size, precision=chosen_precision, optimizer=_optimizer_name(held))

    def decide() -> Candidate:
        return _candidate(model, example, plan, limits, forward=run_forward, loss=loss, devices=devices)

    candidate = on_first_rank(decide) if place.num_ranks > 1 else decide()
    opening = Opening(
        functions=functions_of(run_forward, loss),
        example=example,
        dims=dims,
        optimizer=held,
        schedule=schedule,
        settings=SessionSettings(seed=seed, clip_norm=clip_norm, batch_size=size),
        compile=compile,
        check=check,
    )
    return open_with(model, candidate, opening, place)


def _join() -> None:
    """Join the group that torchrun's variables describe, unless the script has done so."""
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(
        os.environ.get("LOCAL_WORLD_SIZE", "1")
    )
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    make_repeatable(DeviceType.CUDA if on_gpu else DeviceType.CPU)
    dist.init_process_group("nccl" if on_gpu else "gloo")


def _optimizer_name(optimizer: Optimizer) -> str:
    """The name under which the planner knows the optimizer's memory; that of AdamW for one it does not know."""
    name = type(optimizer).__name__.lower()
    return name if name in OPTIMIZERS else "adamw"


def _precision(name: str) -> Precision:
    try:
        return Precision(name)
    except ValueError:
        names = ", ".join(item.value for item in Precision)
        raise OptionError(f"precision is '{name}'", try_=f"one of {names}") from None


def _candidate(
    model: nn.Module,
    example: Any,
    plan: PlanChoice,
    limits: Limits,
    *,
    forward: Callable[[nn.Module, Any], Any],
    loss: Callable[..., Any] | None,
    devices: str | None,
) -> Candidate:
    if isinstance(plan, Candidate):
        return plan
    if isinstance(plan, str) and plan.endswith(".json"):
        plan = from_json_text(Plan, Path(plan).read_text(encoding="utf-8"))
    if isinstance(plan, str):
        plan = _make_plan(model, example, plan, limits, forward=forward, loss=loss, devices=devices)
    if plan.best is None:
        raise PlanError("no plan fits", found=plan.smallest_change or "nothing was searched")
    return plan.best


def _make_plan(
    model: nn.Module,
    example: Any,
    name: str,
    limits: Limits,
    *,
    forward: Callable[[nn.Module, Any], Any],
    loss: Callable[..., Any] | None,
    devices: str | None,
) -> Plan:
    if name != "auto":
        names = [strategy.value for strategy in Strategy]
        if name not in names:
            raise OptionError(f"plan is '{name}'", try_=f"auto, a plan.json, or one of {', '.join(names)}")
        limits = replace(limits, strategy=Strategy(name))
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    cluster = describe(devices or f"local:{world_size}")
    profile = profile_module(
        model,
        example,
        forward=forward,
        loss=None if loss is None else loss_function(loss),
        batch_samples=num_samples(example, find_dims(example)),
        name=type(model).__name__,
        device_type=cluster.device.type,
    )
    return make_plan(profile, cluster, limits)
