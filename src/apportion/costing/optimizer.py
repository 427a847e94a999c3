"""What an optimizer keeps and moves per trainable byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..describing.catalogue import nearest
from ..errors import OptionError

OPERATOR_SECONDS = 7e-6
"""One in-place operator of an optimizer on a tiny CPU tensor: AdamW's step of an nn.Linear(8, 8), torch 2.13,
takes 70 us per tensor for its 9 operators and the bookkeeping around them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCost:
    """Units: state and traffic in multiples of the trainable bytes (torch keeps state in the parameter's type).

    `traffic` counts what the unfused step reads and writes; `operations` are the operators per tensor.
    """

    state: float
    traffic: float
    operations: int


# State: torch.optim's `init` of each optimizer. Traffic and operations: the operators of torch 2.13's
# `_single_tensor_*`, each reading its operands and writing its result once. SGD is counted with momentum.
# Adafactor keeps a row and a column per matrix: under a hundredth for sides of 200 and more.
OPTIMIZERS: Mapping[str, OptimizerCost] = {
    "adamw": OptimizerCost(state=2.0, traffic=21.0, operations=9),
    "adam": OptimizerCost(state=2.0, traffic=19.0, operations=8),
    "sgd": OptimizerCost(state=1.0, traffic=8.0, operations=3),
    "adafactor": OptimizerCost(state=0.01, traffic=14.0, operations=14),
    "adagrad": OptimizerCost(state=1.0, traffic=11.0, operations=4),
    "adadelta": OptimizerCost(state=2.0, traffic=20.0, operations=9),
    "adamax": OptimizerCost(state=2.0, traffic=15.0, operations=7),
    "asgd": OptimizerCost(state=1.0, traffic=8.0, operations=5),
    "muon": OptimizerCost(state=1.0, traffic=12.0, operations=24),
    "nadam": OptimizerCost(state=2.0, traffic=22.0, operations=10),
    "radam": OptimizerCost(state=2.0, traffic=21.0, operations=10),
    "rmsprop": OptimizerCost(state=1.0, traffic=12.0, operations=5),
    "rprop": OptimizerCost(state=2.0, traffic=18.0, operations=10),
    "sparseadam": OptimizerCost(state=2.0, traffic=21.0, operations=12),
}


def find_optimizer(name: str) -> OptimizerCost:
    """Return the costs of a `torch.optim` optimizer, whichever case its name is written in.

    Raises: OptionError naming the nearest one.
    """
    found = OPTIMIZERS.get(name.lower())
    if found is None:
        raise OptionError(
            f"the memory of optimizer '{name}' is not known",
            try_=f"plan with the one that keeps as much state: {nearest(name, OPTIMIZERS)}",
        )
    return found
