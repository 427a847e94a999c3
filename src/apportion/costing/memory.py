"""Bytes on the fullest rank, itemised at the moment when they are most.

Note [moments]
Three moments compete: the start of backward (all activations, gradients of earlier micro-batches), its end
(all gradients, no activations), and the optimizer step (all gradients and the step's temporaries).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..records import Checkpointing, Device, DeviceType, Memory
from .compute import bytes_scale, casts
from .layout import Layout
from .workload import Workload

CUDA_CONTEXT_BYTES = 512 * 2**20
"""CUDA context and cuBLAS handle of a process, beside what torch counts: an assumption, about half a GiB."""
CUDA_WORKSPACE_BYTES = 32 * 2**20
"""cuBLAS workspace on Hopper; torch.backends.cuda, CUBLAS_WORKSPACE_CONFIG (8 MiB before)."""
NCCL_BYTES = 256 * 2**20
"""Buffers of one NCCL communicator, an assumption: 32 channels, two peers, NCCL_BUFFSIZE (4 MiB) each."""
FRAGMENTATION = 0.06
"""Reserved beyond allocated, of what comes and goes: public reports differ by 5-20 %, the lower end with
`expandable_segments`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """What a strategy keeps on one rank. Units: bytes.

    `parameters` and `optimizer` stay; `gradients_before` live when a backward begins, `gradients_after` when
    it ends. `gathered` are unsharded parameters, gradients and buffers during forward and backward;
    `sent` are buffers at the optimizer step. `own_share` is the part of the activations that lives there,
    `loss_samples` the samples whose loss is taken there (None: those of a micro-batch).
    """

    parameters: float
    gradients_before: float
    gradients_after: float
    optimizer: float
    gathered: float = 0.0
    sent: float = 0.0
    own_share: float = 1.0
    loss_samples: int | None = None
    peak_rank: int = 0


def activation_bytes(workload: Workload, layout: Layout) -> float:
    """Return what autograd keeps at the start of backward before the loss, 16-bit copies of weights included.

    With checkpointing: the kept inputs (and results) of all blocks and one block recomputed, with its copies;
    autocast's own cache of them is off.
    """
    samples = layout.micro_batch_size
    scale = bytes_scale(workload, layout.precision)
    copies = 2.0 if casts(workload, layout.precision) else 0.0
    if layout.checkpointing is Checkpointing.NONE or not workload.blocks:
        return workload.saved_bytes * samples * scale + copies * workload.parameters
    kept = workload.rest.saved_bytes
    again = 0.0
    for block in workload.blocks:
        results = block.kept_bytes if layout.checkpointing is Checkpointing.SELECTIVE else 0.0
        kept += min(block.input_bytes + results, block.saved_bytes) * block.count
        once = max(0.0, block.saved_bytes - results) * samples * scale + copies * block.parameters
        again = max(again, once)
    return kept * samples * scale + copies * workload.rest.parameters + again


def itemise(workload: Workload, layout: Layout, device: Device, held: Footprint, *, temporary: float) -> Memory:
    """Return the parts at the fullest moment. `temporary` is what the optimizer step needs for a while."""
    loss = workload.loss_bytes * (held.loss_samples or layout.micro_batch_size)
    acts = activation_bytes(workload, layout) * held.own_share + loss
    steady = workload.batch_bytes * layout.local_batch
    if device.type is DeviceType.CUDA:
        steady += CUDA_CONTEXT_BYTES + CUDA_WORKSPACE_BYTES
        if layout.num_devices > 1:
            steady += NCCL_BYTES
    moments = (
        (held.gradients_before, acts, held.gathered, 0.0),
        (held.gradients_after, 0.0, held.gathered, 0.0),
        (held.gradients_after, 0.0, held.sent, temporary),
    )
    gradients, activations, communication, extra = max(moments, key=sum)
    spare = FRAGMENTATION * (activations + communication + extra) if device.type is DeviceType.CUDA else 0.0
    parts = {
        "parameters": round(held.parameters),
        "gradients": round(gradients),
        "optimizer": round(held.optimizer + extra),
        "activations": round(activations),
        "communication": round(communication),
        "other": round(steady + spare),
    }
    return Memory(**parts, peak=sum(parts.values()), peak_rank=held.peak_rank)
