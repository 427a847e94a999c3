"""One way of running a model: everything the cost depends on besides the model and the machines."""

from __future__ import annotations

from dataclasses import dataclass

from ..records import Checkpointing, Mesh, Precision, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A candidate before it has a price.

    `batch_size` is the global batch; the fullest rank runs `grad_accumulation` forward passes of at most
    `micro_batch_size` samples. `optimizer` is a key of `OPTIMIZERS`. `num_devices` is the devices in use.
    """

    strategy: Strategy
    mesh: Mesh
    batch_size: int
    micro_batch_size: int
    grad_accumulation: int
    num_devices: int
    checkpointing: Checkpointing = Checkpointing.NONE
    precision: Precision = Precision.FP32
    optimizer: str = "adamw"

    @property
    def local_batch(self) -> int:
        """Samples of the fullest data-parallel rank; naive placement runs the whole batch."""
        return -(-self.batch_size // self.mesh.num_data_ranks)
