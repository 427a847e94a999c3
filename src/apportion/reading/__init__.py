"""From a TARGET on the command line to the functions of a job."""

from .parts import Batch, JobParts

__all__ = ["Batch", "JobParts"]
