"""Plans and runs as people read them: tables, progress, metrics files and the page."""

from .components import component_table
from .layout import Sheet
from .metrics import MetricsWriter, read_metrics, read_validation
from .observer import Observer, Observers
from .placement import placement_picture
from .progress import Progress, format_step
from .terminal import compare_table, doctor_table, explain_bars, parity_table, plan_table

__all__ = [
    "MetricsWriter",
    "Observer",
    "Observers",
    "Progress",
    "Sheet",
    "compare_table",
    "component_table",
    "doctor_table",
    "explain_bars",
    "format_step",
    "parity_table",
    "placement_picture",
    "plan_table",
    "read_metrics",
    "read_validation",
]
