"""Activation checkpointing of whole blocks that keeps draws, statistics and buffers as one forward has them.

Note [Recompute]
The second forward of a block must see what the first saw: the same random numbers (the stream is put back to
where the block began), the same buffers (their values then, and their present ones again afterwards), the
same exchange of batch statistics. torch's own RNG save and restore is switched off where a stream draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..batching import DrawScope, DrawStream, GlobalStatistics, clone_buffers, restore_buffers
from ..records import Checkpointing

aten = torch.ops.aten
_KEPT = frozenset(
    {
        aten.mm.default,
        aten.bmm.default,
        aten.addmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }
)


def _keep_products(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    """Save the results of matmul-like operations, recompute the rest (Korthikanti et al. 2022, section 5)."""
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


@dataclass(slots=True)
class ForwardState:
    """What the present forward pass runs under; set by the session for each micro-batch."""

    scope: DrawScope | None = None
    statistics: Callable[[], GlobalStatistics] | None = None


@dataclass(slots=True)
class _Moment:
    stream: DrawStream | None
    stack: list[str]
    counts: dict[str, int]
    buffers: dict[str, torch.Tensor]
    statistics: Callable[[], GlobalStatistics] | None


class BlockCheckpoint:
    """Replaces the forward of one block by its checkpointed form, until `remove`."""

    def __init__(
        self, block: nn.Module, state: ForwardState, *, mode: Checkpointing, changing: tuple[str, ...]
    ) -> None:
        self.block, self.state, self.mode, self.changing = block, state, mode, changing
        self.original = block.forward
        block.forward = self._forward

    def remove(self) -> None:
        """Give the block its own forward back."""
        del self.block.forward

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.original(*args, **kwargs)
        moment = self._now()
        draws = moment.stream is not None
        return checkpoint(
            self.original,
            *args,
            use_reentrant=False,
            preserve_rng_state=not draws,
            context_fn=lambda: self._contexts(moment),
            **kwargs,
        )

    def _now(self) -> _Moment:
        stream = self.state.scope.stream if self.state.scope is not None else None
        return _Moment(
            stream=stream,
            stack=list(stream.stack) if stream else [],
            counts=dict(stream.counts) if stream else {},
            buffers=clone_buffers(dict(self.block.named_buffers()), self.changing),
            statistics=self.state.statistics,
        )

    def _contexts(self, moment: _Moment) -> tuple[Any, Any]:
        if self.mode is Checkpointing.SELECTIVE:
            save, reuse = create_selective_checkpoint_contexts(_keep_products)  # type: ignore[no-untyped-call]
            return save, _Both(self._again(moment), reuse)
        return nullcontext(), self._again(moment)

    @contextmanager
    def _again(self, moment: _Moment) -> Iterator[None]:
        buffers = dict(self.block.named_buffers())
        present = clone_buffers(buffers, self.changing)
        restore_buffers(buffers, moment.buffers)
        try:
            with ExitStack() as stack:
                if moment.statistics is not None:
                    stack.enter_context(moment.statistics())
                if moment.stream is not None and self.state.scope is not None:
                    moment.stream.stack[:] = moment.stack
                    moment.stream.counts = dict(moment.counts)
                    stack.enter_context(self.state.scope.drawing_from(moment.stream))
                yield
        finally:
            restore_buffers(buffers, present)


class _Both:
    """Two context managers as one."""

    def __init__(self, outer: Any, inner: Any) -> None:
        self.outer, self.inner = outer, inner

    def __enter__(self) -> None:
        self.outer.__enter__()
        self.inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)
        self.outer.__exit__(*error)
