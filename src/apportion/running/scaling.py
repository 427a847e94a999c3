"""Loss scaling for fp16 (Micikevicius et al. 2018, section 3.2), on the global gradient norm.

The norm is the same on every rank, so that all ranks skip the same steps without another exchange.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True)
class LossScale:
    """A power of two that doubles after `interval` good steps and halves after an overflow."""

    value: float = 2.0**16
    interval: int = 2000
    good: int = 0

    def accept(self, norm: float) -> bool:
        """Return whether the step with this unscaled gradient norm may be taken, and adapt the scale."""
        if not math.isfinite(norm):
            self.value, self.good = max(1.0, self.value / 2), 0
            return False
        self.good += 1
        if self.good == self.interval:
            self.value, self.good = self.value * 2, 0
        return True
