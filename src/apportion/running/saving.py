"""A session's state in names of the original model, and back into any other plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import TargetError
from .checkpoint import CheckpointMeta, Kind, hash_parameters, load_checkpoint, read_kinds, save_checkpoint
from .checkpoint_files import latest_checkpoint
from .exporting import export_safetensors

if TYPE_CHECKING:
    from .session import Session

State = dict[str, object]


def _parameter_names(model: nn.Module) -> dict[int, str]:
    return {id(p): name for name, p in model.named_parameters()}


def _buffers(session: Session) -> dict[str, torch.Tensor]:
    """Persistent buffers, and those that forward changes."""
    model = session.model
    persistent = set(model.state_dict(keep_vars=True))
    changed = set(session.traits.buffers)
    return {name: b for name, b in model.named_buffers() if name in persistent or name in changed}


def _optimizer_state(session: Session) -> dict[str, dict[str, Any]]:
    names = _parameter_names(session.model)
    return {names[id(p)]: dict(state) for p, state in session.optimizer.state.items() if id(p) in names}


def _settings_of_groups(session: Session) -> tuple[dict[str, Any], ...]:
    names = _parameter_names(session.model)
    return tuple(
        {key: value for key, value in group.items() if key != "params"}
        | {"params": [names[id(p)] for p in group["params"]]}
        for group in session.optimizer.param_groups
    )


def save_session(session: Session, root: Path) -> Path:
    """Write a checkpoint of the session; collective."""
    loader = session.train_loader
    # Tuples stay one object in the checkpoint; a list or mapping would become one key for each entry.
    state: State = {
        "model": {name: p.detach() for name, p in session.model.named_parameters()},
        "buffers": _buffers(session),
        "optimizer": _optimizer_state(session),
        "session": {
            "groups": _settings_of_groups(session),
            "schedule": (session.schedule.state_dict(),) if session.schedule is not None else None,
            "scale": (session.scale.value, session.scale.good) if session.scale is not None else None,
            "seed": session.settings.seed,
        },
    }
    meta = CheckpointMeta(
        step=session.num_steps,
        epoch=loader.epoch if loader is not None else 0,
        world_size=session.world_size,
        strategy=session.candidate.strategy.value,
        fingerprint=session.settings.fingerprint,
        parameters=hash_parameters(session.model.named_parameters()),
        loader=loader.state_dict() if loader is not None else {},
        versions={"torch": torch.__version__},
    )
    return save_checkpoint(
        root, step=session.num_steps, state=state, meta=meta, keep=session.settings.keep_checkpoints
    )


def load_session(session: Session, root: Path) -> None:
    """Fill the session from a checkpoint; collective.

    Raises: TargetError if there is none, or it belongs to another model.
    """
    path = root if (root / "meta.json").is_file() else latest_checkpoint(root)
    if path is None:
        raise TargetError(f"no checkpoint under {root}", try_="give a run's checkpoints directory")
    session_state: dict[str, object] = {"groups": None, "schedule": None, "scale": None, "seed": None}
    optimizer = _optimizer_template(session, path)
    state: State = {
        "model": {name: p.detach() for name, p in session.model.named_parameters()},
        "buffers": _buffers(session),
        "optimizer": optimizer,
        "session": session_state,
    }
    meta = load_checkpoint(path, state)
    session.num_steps = meta.step
    _restore_optimizer(session, optimizer, session_state["groups"])
    schedule = session_state["schedule"]
    if session.schedule is not None and isinstance(schedule, tuple):
        session.schedule.load_state_dict(schedule[0])
    scale = session_state["scale"]
    if session.scale is not None and isinstance(scale, tuple):
        session.scale.value, session.scale.good = scale
    if meta.loader:
        session.resumed_loader = meta.loader
        if session.train_loader is not None:
            session.train_loader.load_state_dict(meta.loader)


def _optimizer_template(session: Session, path: Path) -> dict[str, dict[str, Any]]:
    """Return empty state of the saved kinds for the parameters whose state this rank holds."""
    held = _held_parameters(session)
    template: dict[str, dict[str, Any]] = {}
    for key, saved in read_kinds(path).items():
        owner, _, entry = key.removeprefix("optimizer.").rpartition(".")
        if key.startswith("optimizer.") and owner in held:
            template.setdefault(owner, {})[entry] = _empty_like_saved(held[owner], saved)
    return template


def _empty_like_saved(parameter: nn.Parameter, saved: Kind) -> torch.Tensor | None:
    if saved.shape is None or saved.dtype is None:
        return None
    like = saved.shape == tuple(parameter.shape) and parameter.dim() > 0
    if isinstance(parameter, DTensor) and like:
        return torch.zeros_like(parameter, dtype=saved.dtype).detach()
    return torch.zeros(saved.shape, dtype=saved.dtype, device=parameter.device if like else "cpu")


def _held_parameters(session: Session) -> dict[str, nn.Parameter]:
    partition = session.applied.partition
    named = dict(session.model.named_parameters())
    if partition is None:
        return named
    return {name: p for name, p in named.items() if partition.owners.get(id(p)) == partition.rank}


def _restore_optimizer(session: Session, optimizer: dict[str, dict[str, Any]], groups: Any) -> None:
    named = dict(session.model.named_parameters())
    session.optimizer.state.clear()
    for name, state in optimizer.items():
        session.optimizer.state[named[name]] = state
    for group, saved in zip(session.optimizer.param_groups, groups or [], strict=False):
        group.update({key: value for key, value in saved.items() if key != "params"})


def export_session(session: Session, path: Path) -> None:
    """Write the whole model as safetensors; collective."""
    state: dict[str, torch.Tensor] = {}
    for name, tensor in session.model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            state[name] = tensor
    export_safetensors(path, state)
    if dist.is_initialized():
        dist.barrier()
