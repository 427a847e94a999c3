"""From a TARGET on the command line to the functions of a job."""

from .calling import default_forward, pair_forward
from .checking import as_loss, check_batch, loss_value, run_forward
from .one_batch import num_samples
from .parts import Batch, JobParts
from .target import read_target
from .wording import describe_value

__all__ = [
    "Batch",
    "JobParts",
    "as_loss",
    "check_batch",
    "default_forward",
    "describe_value",
    "loss_value",
    "num_samples",
    "pair_forward",
    "read_target",
    "run_forward",
]
