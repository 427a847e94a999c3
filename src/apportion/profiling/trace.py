"""One forward and backward of a module, with its costs booked on the modules that caused them.

Note [booking]
A module on top of the call stack owns what happens: operators, tensors that autograd keeps, calls. In the
backward there is no stack; autograd nodes carry the sequence number they were made with, and the numbers of
a module's forward are an interval. Numbers are exclusive here (a module without its children); sums over
subtrees are made by `components`.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..torch_private import backward_sequence_number, forward_sequence_number
from .operators import Window, is_move, matmul_flops, storage_of, tensor_bytes, tensors_in, traffic_bytes
from .repeats import Repeats
from .signatures import signature

OUTSIDE = -1
"""Owner of what happens outside every module: the loss."""


@dataclass(slots=True)
class Cost:
    """Exclusive numbers of one module. Units: FLOPs (two per multiply-add), bytes, calls."""

    forward_flops: int = 0
    backward_flops: int = 0
    pointwise_flops: int = 0
    traffic_bytes: int = 0
    saved_bytes: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    calls: int = 0


class Trace:
    """The books of one run. `modules` is the tree in pre-order, the root first."""

    def __init__(self, modules: Mapping[str, nn.Module], *, repeats: Repeats | None) -> None:
        self.names = list(modules)
        self.modules = list(modules.values())
        self.costs = [Cost() for _ in self.modules]
        self.signatures: list[str] = ["" for _ in self.modules]
        self.repeats = repeats
        self.paused = False
        self.backward = False
        self.largest_bytes = 0
        self._holds_parameters = [_holds_parameters(module) for module in self.modules]
        self._stack: list[int] = []
        self._depth = 0
        self._marks: list[int] = []
        self._owners: list[int] = []
        self._excluded: dict[int, torch.UntypedStorage] = {}
        self._saved: dict[int, torch.UntypedStorage] = {}
        self._outside_saved = 0
        self.window = Window(start=0)

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Leave the storages of parameters, buffers and the batch out of the saved activations."""
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is not None:
                self._excluded[id(storage)] = storage

    @property
    def loss_bytes(self) -> int:
        """The most that lived at once since the model's last layer, its output included."""
        held = {id(storage): storage for storage in self.window.held}
        unsaved = sum(s.nbytes() for key, s in held.items() if key not in self._saved)
        return unsaved + self.window.peak + self._outside_saved

    def wrap(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `forward` of module `index` with its costs booked."""

        @functools.wraps(forward)
        def booked(*args: Any, **kwargs: Any) -> Any:
            return self._call(index, forward, args, kwargs)

        return booked

    def _call(self, index: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        first = not self.backward
        self._enter(index)
        try:
            if first and self.repeats is not None:
                out = self._run_or_replay(self.repeats, index, forward, args, kwargs)
            else:
                out = forward(*args, **kwargs)
            if first:
                self._book_call(index, args, kwargs, out)
        finally:
            self._exit(index)
        if first and self._depth == 0 and (self._heavy(index) or (index == 0 and not _has_loss(out))):
            self._restart_window(out)
        return out

    def _run_or_replay(
        self, repeats: Repeats, index: int, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        self.paused = True
        try:
            replayed, out, kept = repeats.replay(index, args, kwargs)
        finally:
            self.paused = False
        if replayed:
            for storage in map(storage_of, kept):
                if storage is not None:
                    self._saved[id(storage)] = storage
        else:
            out = forward(*args, **kwargs)
            repeats.record(index, out, self._is_saved)
        return out

    def _is_saved(self, tensor: Tensor) -> bool:
        storage = storage_of(tensor)
        return storage is not None and id(storage) in self._saved

    def _heavy(self, index: int) -> bool:
        return index != 0 and self._holds_parameters[index]

    def _enter(self, index: int) -> None:
        self._stack.append(index)
        self._depth += self._heavy(index)
        self._mark()

    def _exit(self, index: int) -> None:
        self._stack.pop()
        self._depth -= self._heavy(index)
        self._mark()

    def _mark(self) -> None:
        self._marks.append(forward_sequence_number())
        self._owners.append(self._stack[-1] if self._stack else OUTSIDE)

    def _restart_window(self, out: Any) -> None:
        """The layer that ended just now was not the last one before the loss after all: begin again."""
        for owner, size in self.window.saved:
            self._book_saved(owner, size)
        self.window = Window(start=forward_sequence_number(), held=list(tensors_in(out)))

    def _book_saved(self, owner: int, size: int) -> None:
        if owner == OUTSIDE:
            self._outside_saved += size
        else:
            self.costs[owner].saved_bytes += size

    def _book_call(self, index: int, args: Any, kwargs: Any, out: Any) -> None:
        cost = self.costs[index]
        cost.calls += 1
        cost.input_bytes += _distinct_bytes((args, kwargs))
        cost.output_bytes += _distinct_bytes(out)
        if not self.signatures[index]:
            self.signatures[index] = signature((args, kwargs))

    def _owner(self) -> int:
        if self._stack:
            return self._stack[-1]
        sequence = backward_sequence_number() if self.backward else None
        if sequence is None:
            return OUTSIDE
        return self._owners[bisect.bisect_right(self._marks, sequence) - 1] if self._marks else OUTSIDE

    def operator(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> None:
        """Book one operator on its owner."""
        results = list(tensors_in(out))
        for tensor in results:
            self.largest_bytes = max(self.largest_bytes, tensor_bytes(tensor))
        if func.is_view:
            return
        cost = self.costs[max(self._owner(), 0)]
        flops = matmul_flops(func, args, kwargs, out)
        if self.backward:
            cost.backward_flops += flops
            self._close_window()
        else:
            cost.forward_flops += flops
            if not flops and not is_move(func):
                cost.pointwise_flops += sum(tensor.numel() for tensor in results)
            cost.traffic_bytes += traffic_bytes(func, list(tensors_in((args, kwargs))), results)
        if self._depth == 0 and not self.window.closed:
            self._bear(results)

    def _bear(self, results: Sequence[Tensor]) -> None:
        for tensor in results:
            storage = storage_of(tensor)
            if storage is not None and id(storage) not in self._saved and id(storage) not in self._excluded:
                self.window.add(storage)

    def _close_window(self) -> None:
        sequence = backward_sequence_number()
        if sequence is not None and sequence < self.window.start:
            self.window.closed = True

    def pack(self, tensor: Tensor) -> Tensor:
        """Book a tensor that autograd keeps; a storage counts once, on the module that kept it first."""
        storage = storage_of(tensor)
        if self.paused or storage is None or id(storage) in self._excluded or id(storage) in self._saved:
            return tensor
        owner = self._stack[-1] if self._stack else OUTSIDE
        if owner == OUTSIDE and any(storage is held for held in self.window.held):
            return tensor
        self._saved[id(storage)] = storage
        if id(storage) in self.window.born:
            self.window.saved.append((owner, storage.nbytes()))
        else:
            self._book_saved(owner, storage.nbytes())
        return tensor


def _holds_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _has_loss(out: Any) -> bool:
    return any(tensor.dim() == 0 and tensor.requires_grad for tensor in tensors_in(out))


def _distinct_bytes(tree: Any) -> int:
    seen: dict[int, int] = {}
    for tensor in tensors_in(tree):
        storage = storage_of(tensor)
        seen[id(tensor if storage is None else storage)] = tensor_bytes(tensor)
    return sum(seen.values())
