"""Profile, cluster and limits -> Plan. Pure functions on records; never imports torch."""

from .candidates import GENERATORS
from .explaining import explain
from .search import make_plan
from .situation import Situation

__all__ = ["GENERATORS", "Situation", "explain", "make_plan"]
