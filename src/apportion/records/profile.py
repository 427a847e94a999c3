"""What the model costs: one record per component, and the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Method(Enum):
    """How the numbers were found: on fake tensors, or by a small real run."""

    FAKE = "fake"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """One module of the tree, its children included, for the profiled batch.

    Units: `parameters` counts elements; FLOPs count 2 per multiply-add (Kaplan et al. 2020, table 1);
    `*_bytes` are bytes for `Profile.batch_samples` samples. `saved_activation_bytes` is what autograd keeps
    between forward and backward. `memory_traffic_bytes` is what the forward's operations read and write.
    `repeats` is the fqn of the first component with the same fingerprint, or "" for a first one.
    `block` is True for components at the level where the model is cut, wrapped or checkpointed.
    """

    fqn: str
    kind: str
    depth: int
    parameters: int
    parameter_bytes: int
    trainable_parameters: int
    trainable_bytes: int
    buffer_bytes: int
    forward_flops: int
    backward_flops: int
    saved_activation_bytes: int
    input_bytes: int
    output_bytes: int
    memory_traffic_bytes: int
    calls: int
    fingerprint: str
    repeats: str = ""
    block: bool = False
    dtypes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """The component tree in pre-order (the root first, fqn "") and what else the planner must know.

    Units: as in Component, for `batch_samples` samples. `tokens_per_sample` is 0 where samples are not
    sequences. `shared_parameters` holds the groups of names that are one tensor. `loss_bytes` is the peak
    that the loss adds over the saved activations (logits, their gradient, the log-softmax copy).
    `batch_norms`, `sparse_parameters`, `scalar_parameters`, `unused_parameters` hold fqns.
    `matmul_fraction` is the part of forward FLOPs done by matmul-like operations (matmul, convolution,
    attention).
    """

    name: str
    components: tuple[Component, ...]
    batch_samples: int
    tokens_per_sample: int
    batch_bytes: int
    loss_bytes: int
    matmul_fraction: float
    method: Method
    shared_parameters: tuple[tuple[str, ...], ...] = ()
    batch_norms: tuple[str, ...] = ()
    sparse_parameters: tuple[str, ...] = ()
    scalar_parameters: tuple[str, ...] = ()
    unused_parameters: tuple[str, ...] = ()
    largest_tensor_bytes: int = 0
    notes: tuple[str, ...] = ()

    @property
    def root(self) -> Component:
        return self.components[0]

    @property
    def blocks(self) -> tuple[Component, ...]:
        return tuple(component for component in self.components if component.block)
