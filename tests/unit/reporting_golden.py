"""The recorded tables of `reporting`; `python tests/unit/reporting_golden.py` records them anew."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from reporting_samples import (
    GIB,
    candidate,
    checks,
    comparison,
    equal_parity,
    fsdp,
    impossible_plan,
    pipeline,
    plan,
    profile,
    refused_parity,
    wrong_parity,
)

from apportion.reporting import (
    Sheet,
    compare_table,
    component_table,
    doctor_table,
    explain_bars,
    parity_table,
    placement_picture,
    plan_table,
)

TABLES = Path(__file__).parent.parent / "tables"

SHEETS: dict[str, tuple[Sheet, int]] = {
    "plan_80": (plan_table(plan()), 80),
    "plan_160": (plan_table(plan()), 160),
    "plan_nothing_fits": (plan_table(impossible_plan()), 80),
    "explain": (explain_bars(candidate(), 24 * GIB), 80),
    "compare": (compare_table(comparison()), 80),
    "parity": (parity_table([equal_parity(), wrong_parity(), refused_parity()]), 80),
    "doctor": (doctor_table(checks()), 80),
    "components": (component_table(profile()), 80),
    "components_wide": (component_table(profile(), depth=1), 120),
    "placement_fsdp": (placement_picture(fsdp()), 80),
    "placement_pipeline": (placement_picture(pipeline()), 80),
}


def read(name: str) -> str:
    """Return a recorded table without the comment at its head."""
    lines = (TABLES / f"reporting_{name}.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("# "))


def write_all() -> None:
    """Record every table with its origin and the date."""
    for name, (sheet, width) in SHEETS.items():
        origin = (
            f"# Drawn from the invented records of tests/unit/reporting_samples.py at {width} columns, "
            f"{date.today().isoformat()}.\n# Recorded by: python tests/unit/reporting_golden.py\n"
        )
        (TABLES / f"reporting_{name}.txt").write_text(origin + sheet.text(width), encoding="utf-8")


if __name__ == "__main__":
    write_all()
