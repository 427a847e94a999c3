"""Watch one forward pass: which modules run, which parameters they use, where random numbers are drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..batching import flatten, tensors


class UseWatch(TorchFunctionMode):
    """Notes every use of a parameter and the modules that run at that moment.

    `outside` holds the fqns of modules one of whose parameters was used while the module was not running, or
    which changed one of their inputs in place (their forward cannot be wrapped or run a second time), or whose
    output was changed in place afterwards (a hook on it would be lost);
    `calls` counts the forward calls of each module.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
        self.owners = _owners(model)
        self.stack: list[str] = []
        self.outside: set[str] = set()
        self.calls: dict[str, int] = {}
        self.returned: list[tuple[str, torch.Tensor, int]] = []

    def note_changed_outputs(self) -> None:
        """Add to `outside` the modules whose output was changed in place after they had returned it."""
        self.outside |= {name for name, tensor, version in self.returned if tensor._version != version}
        self.returned.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        running = None
        for leaf in flatten([list(args), kwargs])[0]:
            owners = self.owners.get(id(leaf))
            if owners:
                running = set(self.stack) if running is None else running
                self.outside |= owners - running
        return func(*args, **kwargs)


def _owners(model: nn.Module) -> dict[int, set[str]]:
    owners: dict[int, set[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters():
            owners.setdefault(id(parameter), set()).add(name)
    return {key: names - {""} for key, names in owners.items()}


@contextmanager
def watch_uses(model: nn.Module) -> Iterator[UseWatch]:
    """Open a UseWatch over the forward passes of `model`; its hooks are removed afterwards."""
    watch = UseWatch(model)
    handles = []
    for module in model.modules():
        name = watch.names[id(module)]

        versions: list[int] = []

        def enter(
            _module: nn.Module, args: Any, kwargs: Any, name: str = name, versions: list[int] = versions
        ) -> None:
            watch.stack.append(name)
            watch.calls[name] = watch.calls.get(name, 0) + 1
            versions[:] = [t._version for t in tensors((args, kwargs))]

        def leave(
            _module: nn.Module,
            args: Any,
            kwargs: Any,
            _out: Any,
            name: str = name,
            versions: list[int] = versions,
        ) -> None:
            watch.stack.pop()
            if [t._version for t in tensors((args, kwargs))] != versions:
                watch.outside.add(name)
            watch.returned += [(name, t, t._version) for t in tensors(_out)]

        handles.append(module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, always_call=True, with_kwargs=True))
    try:
        with watch:
            yield watch
        watch.note_changed_outputs()
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def unchanged_rng() -> Iterator[None]:
    """Give torch's default generators back their state afterwards."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield
