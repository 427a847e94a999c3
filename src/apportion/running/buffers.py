"""Buffers after a step of several parts: the values that one forward over the whole batch would leave."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn

from ..batching import Part, clone_buffers, restore_buffers
from ..records import BufferRule


class BufferKeeper:
    """Follows the buffers that forward changes through the micro-batches of one step."""

    def __init__(
        self,
        model: nn.Module,
        rules: Mapping[str, BufferRule],
        *,
        group: dist.ProcessGroup | None,
        num_ranks: int,
    ) -> None:
        self.model = model
        self.rules, self.group, self.num_ranks = rules, group, num_ranks
        self.start: dict[str, torch.Tensor] = {}
        self.sums: dict[str, torch.Tensor] = {}

    @property
    def buffers(self) -> dict[str, torch.Tensor]:
        """The tensors that are the buffers now: forward may assign new ones."""
        named = dict(self.model.named_buffers())
        return {name: named[name] for name in self.rules}

    @property
    def simple(self) -> bool:
        """Whether every changed buffer has the same value on all parts."""
        return all(rule is BufferRule.SAME for rule in self.rules.values())

    def begin(self) -> None:
        """Note the values at the start of the step."""
        self.start = clone_buffers(self.buffers, self.buffers)
        self.sums = {}

    def rewind(self) -> None:
        """Give the buffers their values at the start of the step."""
        restore_buffers(self.buffers, self.start)

    def add(self, part: Part) -> None:
        """Take what the micro-batch of `part` left in the buffers."""
        buffers = self.buffers
        for name, rule in self.rules.items():
            value = buffers[name].detach()
            if rule is BufferRule.SAME:
                self.sums[name] = value.clone()
            elif rule in (BufferRule.MEAN, BufferRule.SUM):
                self._add_to_sum(name, rule, value, part)
            elif part.num_samples:
                extreme = torch.maximum if rule is BufferRule.MAX else torch.minimum
                held = self.sums.get(name)
                self.sums[name] = value.clone() if held is None else extreme(held, value)

    def _add_to_sum(self, name: str, rule: BufferRule, value: torch.Tensor, part: Part) -> None:
        if rule is BufferRule.MEAN:
            term = value.double() * part.weight
        else:
            change = value - self.start[name]
            term = change if part.num_samples else torch.zeros_like(change)
        self.sums[name] = self.sums[name] + term if name in self.sums else term

    def finish(self) -> None:
        """Combine over micro-batches and ranks and write the one-device values; collective."""
        buffers = self.buffers
        for name, rule in self.rules.items():
            value = self.sums.get(name)
            if rule in (BufferRule.MAX, BufferRule.MIN):
                value = self._extreme(value, buffers[name], rule)
            assert value is not None
            if rule in (BufferRule.MEAN, BufferRule.SUM):
                if self.num_ranks > 1:
                    dist.all_reduce(value, group=self.group)
                value = value if rule is BufferRule.MEAN else self.start[name] + value
            with torch.no_grad():
                buffers[name].copy_(value)

    def _extreme(self, value: torch.Tensor | None, like: torch.Tensor, rule: BufferRule) -> torch.Tensor:
        if value is None:
            limits = torch.finfo(like.dtype) if like.is_floating_point() else torch.iinfo(like.dtype)
            value = torch.full_like(like, limits.min if rule is BufferRule.MAX else limits.max)
        if self.num_ranks > 1:
            op = dist.ReduceOp.MAX if rule is BufferRule.MAX else dist.ReduceOp.MIN
            dist.all_reduce(value, op, group=self.group)
        return value

    def checksum(self) -> int:
        """Return 20 bits of the values of the buffers that must be the same on every rank."""
        code = 0
        for buffer in self.buffers.values():
            code = zlib.crc32(repr(float(buffer.double().sum())).encode(), code)
        return code & 0xFFFFF
