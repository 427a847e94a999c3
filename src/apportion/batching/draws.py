"""Random numbers that belong to the sample and the layer, not to the rank.

Note [Draws]
Every random operation of a forward pass is answered from a counter-based stream keyed by
(seed, step, module, n-th draw in that module) with the sample's position in the global batch as the counter.
A part of the batch therefore draws exactly what the whole batch would draw for those samples, under any plan.
Draws without a batch dimension (random depth, a permutation) have no counter and agree on every rank.
On CPU the stream is numpy's Philox (Salmon et al. 2011); on other devices, where numbers must be made in
place, it is the splitmix64 finalizer (Steele et al. 2014) over the element index.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import RefusedError
from ..torch_private import TorchDispatchMode
from .exchange import Part

_PHILOX_BLOCK = 8  # float32 values per counter step: 4 words of 64 bits
aten = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawSite:
    """Where a draw happened: the module, the n-th draw inside it, and the dimension that holds the batch."""

    module: str
    index: int
    dim: int | None


@dataclass(slots=True)
class DrawLog:
    """Shapes of the draws of one forward pass, by (module, index)."""

    shapes: dict[tuple[str, int], tuple[int, ...]] = field(default_factory=dict)


def find_sites(longer: DrawLog, shorter: DrawLog) -> tuple[DrawSite, ...]:
    """Return the draw sites; the batch dimension is the one whose size differs between two batch sizes."""
    sites = []
    for (module, index), shape in longer.shapes.items():
        other = shorter.shapes.get((module, index), shape)
        dims = [d for d, (a, b) in enumerate(zip(shape, other, strict=False)) if a != b]
        sites.append(DrawSite(module=module, index=index, dim=dims[0] if dims else None))
    return tuple(sites)


def _key(seed: int, step: int, module: str, index: int) -> int:
    text = f"{seed}/{step}/{module}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")


def _philox(key: int, first: int, count: int, per_sample: int) -> torch.Tensor:
    blocks = -(-per_sample // _PHILOX_BLOCK)
    bits = np.random.Philox(key=key, counter=first * blocks)
    flat = np.random.Generator(bits).random(count * blocks * _PHILOX_BLOCK, dtype=np.float32)
    return torch.from_numpy(flat).view(count, blocks * _PHILOX_BLOCK)[:, :per_sample]


def _logical_shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _splitmix(key: int, first: int, count: int, per_sample: int, device: torch.device) -> torch.Tensor:
    start, stop = first * per_sample, (first + count) * per_sample
    z = torch.arange(start, stop, dtype=torch.int64, device=device)
    z = (z + 1) * -7046029254386353131 + _signed(key)
    z = (z ^ _logical_shift(z, 30)) * -4658895280553007687
    z = (z ^ _logical_shift(z, 27)) * -7723592293110705685
    z = z ^ _logical_shift(z, 31)
    return (_logical_shift(z, 40).to(torch.float32) * 2.0**-24).view(count, per_sample)


def _signed(key: int) -> int:
    low = key & ((1 << 64) - 1)
    return low - (1 << 64) if low >= 1 << 63 else low


@dataclass(slots=True)
class DrawStream:
    """The stream of one forward pass over one part."""

    seed: int
    step: int
    part: Part
    sites: Mapping[tuple[str, int], int | None]
    log: DrawLog | None = None
    stack: list[str] = field(default_factory=lambda: [""])
    counts: dict[str, int] = field(default_factory=dict)

    def uniform(self, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
        """Return float32 numbers in [0, 1) of `shape` for the next draw in the present module."""
        module = self.stack[-1]
        index = self.counts.get(module, 0)
        self.counts[module] = index + 1
        if self.log is not None:
            self.log.shapes[(module, index)] = shape
        key = _key(self.seed, self.step, module, index)
        dim = self._batch_dim(module, index, shape)
        rows = max(1, self.part.num_samples)
        if dim is None:
            return self._numbers(key, 0, 1, math.prod(shape), device).reshape(shape)
        moved = (shape[dim], *shape[:dim], *shape[dim + 1 :])
        per_sample = math.prod(shape) // rows
        numbers = self._numbers(key, self.part.start, rows, per_sample, device)
        return numbers.reshape(moved).movedim(0, dim)

    def _batch_dim(self, module: str, index: int, shape: tuple[int, ...]) -> int | None:
        rows = max(1, self.part.num_samples)
        if (module, index) in self.sites:
            dim = self.sites[(module, index)]
        else:
            dim = 0 if shape and shape[0] % rows == 0 and shape[0] > 0 else None
        if dim is not None and (dim >= len(shape) or shape[dim] % rows):
            raise RefusedError(
                f"random numbers drawn in '{module or 'the model'}' do not follow the batch",
                found=f"shape {shape} for {rows} samples",
                try_="draw with the batch as a dimension of its own, or switch the randomness off",
            )
        return dim

    @staticmethod
    def _numbers(key: int, first: int, count: int, per_sample: int, device: torch.device) -> torch.Tensor:
        if device.type == "cpu":
            return _philox(key, first, count, per_sample)
        return _splitmix(key, first, count, per_sample, device)


def _bernoulli(stream: DrawStream, like: torch.Tensor, p: Any) -> torch.Tensor:
    kept: torch.Tensor = stream.uniform(tuple(like.shape), like.device) < p
    return kept.to(like.dtype)


def _normal(stream: DrawStream, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    u = stream.uniform(shape, device) + 2.0**-25
    normal: torch.Tensor = torch.special.ndtri(u.to(torch.float64)).to(torch.float32)
    return normal


def _exponential(stream: DrawStream, like: torch.Tensor, rate: float) -> torch.Tensor:
    negative: torch.Tensor = torch.log1p(-stream.uniform(tuple(like.shape), like.device))
    made: torch.Tensor = negative / -rate
    return made


def _dropout(
    stream: DrawStream, x: torch.Tensor, p: float, train: bool | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = stream.uniform(tuple(x.shape), x.device) >= p
    return x * mask * (1.0 / (1.0 - p) if p < 1 else 0.0), mask


def _integers(
    stream: DrawStream, shape: tuple[int, ...], low: int, high: int, device: torch.device
) -> torch.Tensor:
    u = stream.uniform(shape, device).to(torch.float64)
    return (low + (u * (high - low)).floor()).clamp_(max=high - 1).to(torch.int64)


def _multinomial(stream: DrawStream, p: torch.Tensor, n: int, replacement: bool) -> torch.Tensor:
    if not replacement or n == 1:
        race = p.to(torch.float32) / _exponential(stream, p, 1.0).clamp_min(1e-30)
        return race.topk(n, dim=-1).indices
    u = stream.uniform((*p.shape[:-1], n), p.device)
    edges = (p / p.sum(-1, keepdim=True)).cumsum(-1).to(torch.float32)
    return torch.searchsorted(edges, u.contiguous()).clamp_(max=p.size(-1) - 1)


class DrawMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers every random operation of torch from a DrawStream; one it does not know is refused by name."""

    def __init__(self, stream: DrawStream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        return draw(self.stream, func, args, kwargs)


class DrawWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells whether random numbers are drawn; nothing is changed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.drew = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            quiet = "attention" in func.overloadpacket.__name__ and not _drops_out(func, args, kwargs)
            self.drew |= not quiet
        return func(*args, **kwargs)


def _factory(kwargs: Mapping[str, Any]) -> tuple[torch.dtype, torch.device]:
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return dtype, torch.device(kwargs.get("device") or "cpu")


def _filled(target: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return target.copy_(values)


def _draw_in_place(stream: DrawStream, name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
    x, rest = args[0], args[1:]
    if name in ("bernoulli_", "bernoulli"):
        p = rest[0] if rest else kwargs.get("p", x if name == "bernoulli" else 0.5)
        made = _bernoulli(stream, x, p)
        return _filled(x, made) if name == "bernoulli_" else made
    if name == "uniform_":
        low = rest[0] if rest else kwargs.get("from", 0.0)
        high = rest[1] if len(rest) > 1 else kwargs.get("to", 1.0)
        return _filled(x, low + stream.uniform(tuple(x.shape), x.device) * (high - low))
    if name == "normal_":
        mean = rest[0] if rest else kwargs.get("mean", 0.0)
        std = rest[1] if len(rest) > 1 else kwargs.get("std", 1.0)
        return _filled(x, mean + std * _normal(stream, tuple(x.shape), x.device))
    if name == "normal":
        mean, std = torch.broadcast_tensors(x, torch.as_tensor(rest[0] if rest else kwargs.get("std", 1.0)))  # type: ignore[no-untyped-call]
        return torch.addcmul(mean, std.to(x.dtype), _normal(stream, tuple(mean.shape), x.device).to(x.dtype))
    if name == "exponential_":
        return _filled(x, _exponential(stream, x, rest[0] if rest else kwargs.get("lambd", 1.0)))
    if name == "multinomial":
        return _multinomial(stream, x, rest[0], rest[1] if len(rest) > 1 else kwargs.get("replacement", False))
    return None


def _draw_new(stream: DrawStream, name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
    if name in ("rand_like", "randn_like"):
        x = args[0]
        shape, dtype, device = tuple(x.shape), kwargs.get("dtype") or x.dtype, x.device
        made = stream.uniform(shape, device) if name == "rand_like" else _normal(stream, shape, device)
        return made.to(dtype)
    dtype, device = _factory(kwargs)
    if name == "normal" and len(args) > 2:
        return _normal(stream, tuple(args[2]), device).mul(args[1]).add(args[0]).to(dtype)
    if name == "rand":
        return stream.uniform(tuple(args[0]), device).to(dtype)
    if name == "randn":
        return _normal(stream, tuple(args[0]), device).to(dtype)
    if name == "randperm":
        return stream.uniform((args[0],), device).argsort().to(kwargs.get("dtype") or torch.int64)
    if name == "randint":
        low, high, size = (0, args[0], args[1]) if len(args) == 2 else args[:3]
        return _integers(stream, tuple(size), low, high, device).to(kwargs.get("dtype") or torch.int64)
    return None


def draw(stream: DrawStream, func: Any, args: Any, kwargs: Any) -> Any:
    """Return what the random operation `func` gives when it draws from `stream`.

    Raises: RefusedError for an operation whose draws cannot be taken from the stream.
    """
    name = func.overloadpacket.__name__
    if name == "native_dropout":
        return _dropout(stream, *args)
    takes_tensor = bool(args) and isinstance(args[0], torch.Tensor) and not name.endswith("_like")
    made = (_draw_in_place if takes_tensor else _draw_new)(stream, name, args, kwargs)
    if made is not None:
        return made
    if "attention" in name and not _drops_out(func, args, kwargs):
        return func(*args, **kwargs)
    raise RefusedError(
        f"{stream.stack[-1] or 'the model'} draws random numbers with {func}, which cannot be tied to samples",
        try_="use torch.rand, dropout or bernoulli there, or set its dropout to 0",
    )


def _drops_out(func: Any, args: Any, kwargs: Any) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    values = dict(zip(names, args, strict=False)) | dict(kwargs)
    return bool(values.get("dropout_p", 0.0))


class DrawScope:
    """Hooks that tell a stream which of the named modules is running; `stream` is None while nothing draws."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self.stream: DrawStream | None = None
        modules = dict(model.named_modules())
        self._handles: list[Any] = []
        for name in names:
            if name and name in modules:
                self._watch(modules[name], name)

    def _watch(self, module: nn.Module, name: str) -> None:
        def enter(_module: nn.Module, _args: Any) -> None:
            if self.stream is not None:
                self.stream.stack.append(name)

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            if self.stream is not None and self.stream.stack[-1] == name:
                self.stream.stack.pop()

        self._handles.append(module.register_forward_pre_hook(enter, prepend=True))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    @contextmanager
    def drawing_from(self, stream: DrawStream) -> Iterator[None]:
        """Answer random operations from `stream`; torch's, and Python's and numpy's generators by its key."""
        before, self.stream = self.stream, stream
        try:
            with seeded_python(_key(stream.seed, stream.step, "python", 0)), DrawMode(stream):
                yield
        finally:
            self.stream = before

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


@contextmanager
def seeded_python(key: int) -> Iterator[None]:
    """Seed Python's and numpy's global generators from `key`, and give them back their states afterwards."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
