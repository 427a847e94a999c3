"""From a module and a sample batch to what it costs and which exact splits of the batch exist."""

from .costs import profile_module, profile_parts

__all__ = ["profile_module", "profile_parts"]
