"""Run a module on meta tensors in place of its weights, and leave it as it was.

`Data` says what stays real: nothing (META), or whole numbers and flags of the batch and the buffers (MIXED),
on which a forward may decide what to do next.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from ..errors import TargetError
from ..records import DeviceType
from ..torch_private import tree_map
from .kernels import Kernels
from .operators import Operators, as_meta, tensors_in
from .repeats import Repeats
from .trace import Trace

Forward = Callable[[nn.Module, Any], Any]
Loss = Callable[[Any, Any], Any]


class Data(Enum):
    """Which tensors carry values during a run."""

    META = "meta"
    MIXED = "mixed"
    REAL = "real"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is run: the module, one batch, how to call it and how to get the loss (None: its own)."""

    module: nn.Module
    batch: Any
    forward: Forward
    loss: Loss | None
    device_type: DeviceType


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The books of a run and the names of parameters that the loss does not depend on."""

    trace: Trace
    unused: tuple[str, ...]
    no_backward: bool


class _Host(nn.Module):
    """Holds the module so that `functional_call` can call it the user's way."""

    def __init__(self, module: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.module = module
        self.call = forward

    def forward(self, batch: Any) -> Any:
        return self.call(self.module, batch)


def run(subject: Subject, *, data: Data, repeats: Repeats | None) -> Run:
    """Run forward, loss and backward once and return the books.

    The module's attributes, gradients and random state are those of before, whether it works or not.

    Raises: TargetError for a loss that is no scalar; whatever the module raises on such tensors.
    """
    module = subject.module
    trace = Trace(dict(module.named_modules()), repeats=repeats)
    with restored(module), torch.random.fork_rng(devices=[]), kept_python_random():
        tensors = _stand_ins(module, data)
        batch = tree_map(_converter(data), subject.batch)
        trace.exclude(tensors.values())
        trace.exclude(tensors_in(batch))
        for index, below in enumerate(trace.modules):
            if not isinstance(below, torch.jit.ScriptModule):
                vars(below)["forward"] = trace.wrap(index, below.forward)
        with ExitStack() as stack:
            _enter_modes(stack, trace, subject, data)
            with saved_tensors_hooks(trace.pack, _same):
                host = _Host(module, subject.forward)
                state = {f"module.{name}": tensor for name, tensor in tensors.items()}
                output = functional_call(host, state, (batch,), strict=False)
                loss = scalar_loss(output, batch, subject.loss)
            return _backward(trace, loss, tensors)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _enter_modes(stack: ExitStack, trace: Trace, subject: Subject, data: Data) -> None:
    if data is Data.META:
        stack.enter_context(torch.device("meta"))
    if data is not Data.REAL:
        stack.enter_context(Kernels(subject.device_type))
    stack.enter_context(Operators(trace, on_meta=data is not Data.REAL, keep_values=data is Data.MIXED))


def _backward(trace: Trace, loss: Tensor, tensors: Mapping[str, Tensor]) -> Run:
    wanted = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
    if not wanted or not loss.requires_grad:
        return Run(trace=trace, unused=tuple(wanted), no_backward=True)
    trace.backward = True
    grads = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
    unused = tuple(name for name, grad in zip(wanted, grads, strict=True) if grad is None)
    return Run(trace=trace, unused=unused, no_backward=False)


def scalar_loss(output: Any, batch: Any, loss: Loss | None) -> Tensor:
    """Return the scalar to differentiate: that of `loss`, the total of (total, count), or the model's own.

    Raises: TargetError if there is none or it is no scalar.
    """
    value = loss(output, batch) if loss is not None else _own_loss(output)
    if isinstance(value, tuple) and len(value) == 2:
        value = value[0]
    if not isinstance(value, Tensor) or value.numel() != 1:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TargetError(
            "the loss is not a scalar tensor",
            found=found,
            try_="return the mean over the samples of the batch, or (total, count)",
        )
    return value.reshape(())


def _own_loss(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output.get("loss")
    return vars(output).get("loss") if hasattr(output, "__dict__") else None


def refuse_lazy(module: nn.Module) -> None:
    """Raise TargetError for a parameter that gets its shape only from a first call."""
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise TargetError(
                f"parameter '{name}' has no shape yet",
                found="a lazy module that was never called",
                try_="call the model once on a batch before handing it over",
            )


def _converter(data: Data) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if data is Data.REAL or not isinstance(value, Tensor):
            return value
        if data is Data.MIXED and not value.is_floating_point() and not value.is_complex():
            return value
        return as_meta(value).requires_grad_(value.requires_grad)

    return convert


def _stand_ins(module: nn.Module, data: Data) -> dict[str, Tensor]:
    """Return what stands in for every parameter and buffer, by its first name."""
    if data is Data.REAL:
        own = {n: p.detach().requires_grad_(p.requires_grad) for n, p in module.named_parameters()}
        return own | {name: buffer.clone() for name, buffer in module.named_buffers()}
    convert = _converter(data)
    tensors: dict[str, Tensor] = {
        name: nn.Parameter(as_meta(p.detach()), requires_grad=p.requires_grad)
        if not p.is_meta
        else nn.Parameter(p.detach(), requires_grad=p.requires_grad)
        for name, p in module.named_parameters()
    }
    for name, buffer in module.named_buffers():
        standing = convert(buffer)
        tensors[name] = buffer.clone() if standing is buffer and not buffer.is_meta else standing
    return tensors


@contextmanager
def kept_python_random() -> Iterator[None]:
    """Put back the state of Python's own random numbers."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


@contextmanager
def restored(module: nn.Module) -> Iterator[None]:
    """Put back every attribute of every submodule, and the contents of their dicts, lists and sets."""
    modules = list(module.modules())
    before = [dict(vars(below)) for below in modules]
    contents = [
        (value, value.copy())
        for attributes in before
        for value in attributes.values()
        if type(value) in (dict, OrderedDict, list, set)
    ]
    try:
        yield
    finally:
        for below, attributes in zip(modules, before, strict=True):
            vars(below).clear()
            vars(below).update(attributes)
        for container, copy in contents:
            container.clear()
            container.extend(copy) if isinstance(container, list) else container.update(copy)
