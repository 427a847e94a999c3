"""What is wrong with this machine for this work, and the fix. Nothing is changed."""

from .checks import check_facts
from .facts import Facts, look
from .machine import check_machine

__all__ = ["Facts", "check_facts", "check_machine", "look"]
