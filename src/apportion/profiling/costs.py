"""Profile a module: on meta tensors where that works, by a small real run where it does not."""

from __future__ import annotations

from typing import Any

import psutil
from torch import nn

from ..errors import ApportionError, TargetError
from ..reading.parts import JobParts
from ..records import DeviceType, Method, Profile
from ..units import format_bytes
from .building import build_without_weights
from .components import Labels, assemble
from .fake import Data, Forward, Loss, Run, Subject, refuse_lazy, run
from .fingerprint import fingerprints
from .operators import tensors_in
from .repeats import Repeats

SMALLEST_BATCH = 2
"""Samples of a real run: batch statistics and in-batch negatives need more than one."""

MEMORY_SHARE = 0.5
"""Part of the free memory that a real run may need, by the four copies that training holds of each weight."""


def profile_module(
    module: nn.Module,
    batch: Any,
    *,
    forward: Forward,
    loss: Loss | None,
    batch_samples: int,
    name: str,
    tokens_per_sample: int = 0,
    device_type: DeviceType = DeviceType.CUDA,
) -> Profile:
    """Return what `module` costs for `batch`, which holds `batch_samples` samples.

    Model:  weights and data are meta tensors, so nothing is computed; equal blocks are run twice and copied.
            Where the forward needs values, the whole numbers of the batch stay real; where that is not enough
            the module is run for real on the batch as it is (`Method.MEASURED`, with the reason in `notes`).
            `device_type` says whose kernels are assumed for attention and dropout.
    Raises: TargetError if the forward, the loss or the backward fails on real tensors too.
    """
    subject = Subject(module=module, batch=batch, forward=forward, loss=loss, device_type=device_type)
    refuse_lazy(module)
    static = fingerprints(dict(module.named_modules()))

    def labels(method: Method, notes: tuple[str, ...]) -> Labels:
        return Labels(
            name=name,
            batch_samples=batch_samples,
            tokens_per_sample=tokens_per_sample,
            method=method,
            notes=notes,
        )

    done, reason = _on_meta(subject, static)
    if done is not None:
        return assemble(done, subject, static, labels(Method.FAKE, ()))
    done = _for_real(subject)
    note = f"Measured by a real run of {batch_samples} samples: without values, {reason}."
    return assemble(done, subject, static, labels(Method.MEASURED, (note,)))


def profile_parts(parts: JobParts, *, batch_samples: int, device_type: DeviceType = DeviceType.CUDA) -> Profile:
    """Return what the job's model costs for a batch of `batch_samples` samples, without building its weights.

    A job that has one batch of fewer samples is profiled for that batch. Where the model has to be run for
    real, it is run on a small batch and the numbers that grow with the batch are scaled.

    Raises: TargetError if the model cannot be run, or would have to be and does not fit in memory.
    """
    batch = parts.example(batch_samples)
    samples = count_samples(batch, parts.batch_dims, default=batch_samples)
    subject = Subject(
        module=build_without_weights(parts.model),
        batch=batch,
        forward=parts.forward,
        loss=parts.loss,
        device_type=device_type,
    )
    refuse_lazy(subject.module)
    static = fingerprints(dict(subject.module.named_modules()))
    done, reason = _on_meta(subject, static)
    if done is not None:
        return assemble(done, subject, static, _labels_of(parts, samples, Method.FAKE, ()))
    return _measure_parts(parts, samples, subject, reason)


def _labels_of(
    parts: JobParts, samples: int, method: Method, notes: tuple[str, ...], *, scale: float = 1.0
) -> Labels:
    return Labels(
        name=parts.name,
        batch_samples=samples,
        tokens_per_sample=parts.tokens_per_sample,
        method=method,
        notes=notes,
        scale=scale,
    )


def _measure_parts(parts: JobParts, samples: int, planned: Subject, reason: str) -> Profile:
    weights = sum(p.numel() * p.element_size() for p in planned.module.parameters())
    free = psutil.virtual_memory().available
    if 4 * weights > MEMORY_SHARE * free:
        raise TargetError(
            f"the model has to be run to see what it costs ({reason}), and is too large for this machine",
            found=f"{format_bytes(weights)} of weights, {format_bytes(free)} of free memory",
            try_="make the forward independent of values (no .item(), nonzero), or use a larger machine",
        )
    batch = parts.example(min(samples, SMALLEST_BATCH))
    ran = count_samples(batch, parts.batch_dims, default=min(samples, SMALLEST_BATCH))
    subject = Subject(
        module=parts.model(),
        batch=batch,
        forward=parts.forward,
        loss=parts.loss,
        device_type=planned.device_type,
    )
    done = _for_real(subject)
    note = f"Measured by a real run of {ran} samples, scaled to {samples}: without values, {reason}."
    static = fingerprints(dict(subject.module.named_modules()))
    labels = _labels_of(parts, samples, Method.MEASURED, (note,), scale=samples / max(ran, 1))
    return assemble(done, subject, static, labels)


def count_samples(batch: Any, dims: tuple[int | None, ...] | None, *, default: int) -> int:
    """Return the samples of a batch: the length of its first tensor's batch axis (0 unless `dims` says)."""
    for i, tensor in enumerate(tensors_in(batch)):
        axis = 0 if dims is None else dims[i] if i < len(dims) else None
        if axis is not None and tensor.dim() > axis:
            return int(tensor.shape[axis])
    return default


def _on_meta(subject: Subject, static: dict[str, str]) -> tuple[Run | None, str]:
    """Return the books of a run without values, or None and the reason why there are none.

    The blocks that were answered for may be why a run failed, so the last try runs every block.
    """
    reason = ""
    for data, copying in ((Data.META, True), (Data.MIXED, True), (Data.MIXED, False)):
        repeats = Repeats(dict(subject.module.named_modules()), static) if copying else None
        done, error = _attempt(subject, data, repeats)
        if done is not None and repeats is not None and repeats.mixed:
            done, error = _attempt(subject, data, None)
        if done is not None:
            return done, ""
        reason = error
        if repeats is not None and not repeats.sources and data is Data.MIXED:
            break
    return None, reason


def _attempt(subject: Subject, data: Data, repeats: Repeats | None) -> tuple[Run | None, str]:
    """Run once; the user's forward may raise anything, and the reason is told in the profile's notes."""
    try:
        return run(subject, data=data, repeats=repeats), ""
    except ApportionError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return None, f"{type(error).__name__}: {first}"[:200]


def _for_real(subject: Subject) -> Run:
    try:
        return run(subject, data=Data.REAL, repeats=None)
    except ApportionError:
        raise
    except Exception as error:
        raise TargetError(
            "the model could not be run on the example batch",
            found=f"{type(error).__name__}: {error}",
            try_="check forward, loss and the batch with one plain training step",
        ) from error
