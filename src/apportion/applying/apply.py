"""Put a module on its ranks as a candidate says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ..errors import PlanError, RefusedError
from ..records import Candidate, Checkpointing, Strategy, Traits
from .extras import average_gradients
from .optimizers import repoint
from .partition import PartitionedStep
from .placing import place
from .recompute import BlockCheckpoint, ForwardState
from .shard import anchor, choose_units, drop_unused, reached, replicated_names, shard, sparse_tables

SHARDED = frozenset({Strategy.ZERO2, Strategy.FSDP, Strategy.HSDP})
REPLICATED = frozenset({Strategy.DDP, Strategy.ZERO1})
Work = Callable[[nn.Module], torch.Tensor]


class StepModule(nn.Module):
    """Runs a whole forward pass, loss included, as one module call.

    Wrappers hook its call, so that methods other than forward, parameters read from outside and the loss all
    lie inside; the user's module stays what it is.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.anchored: frozenset[str] = frozenset()
        self.used: set[str] = set()

    def forward(self, work: Work) -> torch.Tensor:
        """Return the objective that `work` makes from the model.

        Parameters in `anchored` get at least a zero gradient; `used` collects those that the data reached.
        """
        objective = work(self.model)
        if not self.anchored:
            return objective
        held = {name: p for name, p in self.model.named_parameters() if name in self.anchored}
        self.used |= reached(objective, held)
        return anchor(objective, held.values())


@dataclass(slots=True)
class Applied:
    """The module on this rank, and how a step is done with it.

    `extras` are the parameters whose gradients are averaged apart, `units` the blocks sharded on their own.
    """

    model: nn.Module
    call: nn.Module
    candidate: Candidate
    optimizer: Optimizer
    world_size: int
    extras: dict[str, nn.Parameter] = field(default_factory=dict)
    sparse: frozenset[str] = frozenset()
    units: tuple[str, ...] = ()
    all_used: bool = True
    partition: PartitionedStep | None = None
    state: ForwardState = field(default_factory=ForwardState)
    undo: list[Callable[[], None]] = field(default_factory=list)

    @contextmanager
    def synced(self, sync: bool) -> Iterator[None]:
        """Whether gradients are reduced over ranks in the backward passes inside."""
        if isinstance(self.call, DistributedDataParallel) and not sync:
            with self.call.no_sync():
                yield
        else:
            yield

    def finish_gradients(self) -> None:
        """Average what the wrapper leaves alone, and take away zero gradients that no rank meant."""
        if self.world_size > 1:
            average_gradients(self.extras, self.sparse, None)
        if isinstance(self.call, StepModule) and self.call.anchored:
            drop_unused(self.model, self.call.anchored, self.call.used)
            self.call.used.clear()

    def reshard(self) -> None:
        """Free gathered parameters that a forward without backward has left whole."""
        for module in self.call.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def step_optimizer(self) -> None:
        """Do one optimizer step on all ranks."""
        if self.partition is not None:
            self.partition.step()
        else:
            self.optimizer.step()

    def remove(self) -> None:
        """Take hooks and replaced forwards off the user's module."""
        for undo in reversed(self.undo):
            undo()
        self.undo.clear()


def check_candidate(candidate: Candidate, traits: Traits, model: nn.Module) -> None:
    """Refuse what the candidate cannot keep for this model.

    Raises: RefusedError with the reason and a way out.
    """
    if traits.refusal is not None and (candidate.mesh.num_data_ranks > 1 or candidate.grad_accumulation > 1):
        raise RefusedError(
            f"{candidate.strategy.value} cannot keep the one-device answer: {traits.refusal.reason}",
            found=traits.refusal.found,
            try_=traits.refusal.try_,
        )
    if candidate.grad_accumulation > 1 and not traits.accumulates:
        raise RefusedError(
            "micro-batches cannot keep the one-device answer",
            found="; ".join(traits.notes) or "the whole batch's statistics are needed at once",
            try_=f"--micro-batch-size {candidate.micro_batch_size * candidate.grad_accumulation}",
        )
    if candidate.strategy is Strategy.DP and (traits.batch_norm or traits.draws or traits.buffers):
        raise RefusedError(
            "dp (torch.nn.DataParallel) cannot keep the one-device answer",
            found="batch-norm, random numbers or buffers that forward changes",
            try_="--strategy ddp",
        )


def broadcast_state(model: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers (non-persistent ones included); collective."""
    for tensor in [*model.parameters(), *model.buffers()]:
        dist.broadcast(tensor.detach(), 0)


def apply(
    model: nn.Module, optimizer: Optimizer, candidate: Candidate, traits: Traits, *, device: torch.device
) -> Applied:
    """Return the module on this rank. The model's parameters and the optimizer's groups are changed in place.

    Raises: RefusedError, PlanError.
    """
    check_candidate(candidate, traits, model)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    root = StepModule(model)
    applied = Applied(model=model, call=root, candidate=candidate, optimizer=optimizer, world_size=world_size)
    if candidate.strategy is not Strategy.NAIVE:
        model.to(device)
    _checkpoint_blocks(applied, traits)
    if candidate.strategy in SHARDED:
        _apply_sharded(applied, root, traits, device)
    elif candidate.strategy in REPLICATED:
        _apply_replicated(applied, root, traits, device)
    elif candidate.strategy is Strategy.NAIVE:
        _apply_naive(applied)
    elif candidate.strategy is Strategy.DP:
        _apply_data_parallel(applied, device)
    elif candidate.strategy is not Strategy.SINGLE:
        raise PlanError(f"{candidate.strategy.value} is not available yet", try_="--strategy auto")
    return applied


def block_names(candidate: Candidate) -> tuple[str, ...]:
    """Return the blocks of all stages."""
    return tuple(name for stage in candidate.stages for name in stage.components)


def _checkpoint_blocks(applied: Applied, traits: Traits) -> None:
    mode = applied.candidate.activation_checkpointing
    if mode is Checkpointing.NONE:
        return
    modules = dict(applied.model.named_modules())
    for name in block_names(applied.candidate):
        if name and name in modules and name in traits.forward_only:
            prefix = name + "."
            changing = tuple(b.removeprefix(prefix) for b in traits.buffers if b.startswith(prefix))
            block = BlockCheckpoint(modules[name], applied.state, mode=mode, changing=changing)
            applied.undo.append(block.remove)


def _apply_replicated(applied: Applied, root: StepModule, traits: Traits, device: torch.device) -> None:
    broadcast_state(applied.model)
    named = dict(applied.model.named_parameters())
    applied.sparse = frozenset(traits.sparse) | sparse_tables(applied.model)
    applied.extras = {name: named[name] for name in named if name in applied.sparse}
    unused_possible = traits.conditional or bool(traits.unused)
    applied.all_used = not unused_possible
    frozen = [p for p in applied.extras.values() if p.requires_grad]
    for p in frozen:
        p.requires_grad_(False)
    applied.call = DistributedDataParallel(
        root,
        device_ids=[device.index] if device.type == "cuda" else None,
        forward_sync_buffers=False,
        init_sync=False,
        find_unused_parameters=unused_possible,
        gradient_as_bucket_view=True,
    )
    for p in frozen:
        p.requires_grad_(True)
    if applied.candidate.strategy is Strategy.ZERO1:
        applied.partition = PartitionedStep(applied.optimizer, None)


def _apply_sharded(applied: Applied, root: StepModule, traits: Traits, device: torch.device) -> None:
    broadcast_state(applied.model)
    mesh_record = applied.candidate.mesh
    if mesh_record.dp_replicate > 1:
        shape, axes = (mesh_record.dp_replicate, mesh_record.dp_shard), ("dp_replicate", "dp_shard")
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=axes)
    else:
        mesh = init_device_mesh(device.type, (applied.world_size,), mesh_dim_names=("dp_shard",))
    applied.units = choose_units(applied.model, block_names(applied.candidate), traits)
    replicated = replicated_names(applied.model, applied.units, traits)
    reshard = applied.candidate.strategy is not Strategy.ZERO2
    moved = shard(root, applied.model, mesh, units=applied.units, replicated=replicated, reshard=reshard)
    repoint(applied.optimizer, moved)
    named = dict(applied.model.named_parameters())
    applied.sparse = frozenset(traits.sparse) | sparse_tables(applied.model)
    applied.extras = {name: named[name] for name in replicated if named[name].requires_grad}
    applied.all_used = not (traits.conditional or traits.unused)
    if not applied.all_used:
        inside = tuple(f"{unit}." for unit in applied.units)
        root.anchored = frozenset(
            name
            for name, p in named.items()
            if p.requires_grad and name not in applied.extras and not name.startswith(inside)
        )


def _apply_naive(applied: Applied) -> None:
    count = applied.candidate.mesh.pp
    if torch.cuda.is_available():
        devices = [torch.device("cuda", index) for index in range(count)]
    else:
        devices = [torch.device("cpu")] * count
    handles = place(applied.model, block_names(applied.candidate), devices)
    applied.undo += [handle.remove for handle in handles]


def _apply_data_parallel(applied: Applied, device: torch.device) -> None:
    if device.type != "cuda":
        raise PlanError("dp (torch.nn.DataParallel) needs several GPUs in one process", try_="--strategy ddp")
    applied.call = StepModule(DataParallel(applied.model))
