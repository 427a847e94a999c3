"""Start the processes of a group of ranks, or find out that somebody else has."""

from .joined import JoinedGroup, joined
from .local import launch
from .outcome import Outcome, Tick

__all__ = ["JoinedGroup", "Outcome", "Tick", "joined", "launch"]
