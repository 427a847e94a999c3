"""Apportion: plan, run and prove parallel PyTorch training."""

from __future__ import annotations

__version__ = "0.1.0"
