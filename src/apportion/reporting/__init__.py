"""Plans and runs as people read them: tables, progress, metrics files and the page."""

from .components import component_table
from .html import render, write_report
from .layout import Sheet
from .metrics import MetricsWriter, read_metrics, read_validation
from .observer import Observer
from .placement import placement_picture
from .progress import Progress, format_step
from .runs import read_run
from .terminal import compare_table, doctor_table, explain_bars, parity_table, plan_table
from .verdict import headline, next_steps

__all__ = [
    "MetricsWriter",
    "Observer",
    "Progress",
    "Sheet",
    "compare_table",
    "component_table",
    "doctor_table",
    "explain_bars",
    "format_step",
    "headline",
    "next_steps",
    "parity_table",
    "placement_picture",
    "plan_table",
    "read_metrics",
    "read_run",
    "read_validation",
    "render",
    "write_report",
]
