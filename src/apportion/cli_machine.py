"""`doctor`, `calibrate` and `report`."""

from __future__ import annotations

import os
from pathlib import Path

from . import describing
from .cli_answer import Answer
from .cli_schema import CalibrateOptions, DoctorOptions, ReportOptions
from .doctoring import check_machine
from .errors import ApportionError, OptionError
from .records import CheckStatus, Report, to_json
from .reporting import doctor_table
from .reporting.html import render, write_report
from .reporting.runs import read_run
from .reporting.verdict import headline
from .units import format_bytes, format_flops, format_seconds


def doctor(options: DoctorOptions) -> Answer:
    """Answer with the checks of this machine; an error ends it if one is a problem."""
    checks = check_machine(port=options.port, run_dir=Path(options.run_dir))
    problems = [check for check in checks if check.status is CheckStatus.PROBLEM]
    error = None
    if problems:
        names = ", ".join(check.name for check in problems)
        error = ApportionError(
            f"this machine needs mending: {names}", found=problems[0].found, try_=problems[0].fix
        )
    return Answer(document=checks, views=(doctor_table(checks),), error=error)


def calibrate(options: CalibrateOptions) -> Answer:
    """Measure this machine, keep the result for `--devices local`, write it as a file, and answer with it."""
    path = Path(options.output)
    _check_writable(path)
    cluster = describing.calibrate()
    kept = describing.save_calibration(cluster)
    path.write_text(describing.cluster_to_toml(cluster), encoding="utf-8")
    device = cluster.device
    rates = ", ".join(
        f"{name} {format_flops(rate)}/s" for name, rate in sorted(device.peak_flops_per_second.items())
    )
    link = cluster.intra_node
    lines = (
        f"{cluster.num_devices} x {device.kind}: {rates}",
        f"memory {format_bytes(device.memory_bytes)} at {format_bytes(device.memory_bytes_per_second)}/s",
        f"links {format_bytes(link.bandwidth_bytes_per_second)}/s, {format_seconds(link.latency_seconds)}",
        f"written to {path}; --devices local takes it from {kept}",
    )
    return Answer(document=cluster, views=("\n".join(lines),), notes=cluster.warnings)


def _check_writable(path: Path) -> None:
    folder = path.absolute().parent
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        found = "it is a folder" if path.is_dir() else f"{folder} is missing or not writable"
        raise OptionError(f"--output {path} cannot be written", found=found, try_="name another file")


def report(options: ReportOptions) -> Answer:
    """Write the page of a run and answer with what it says."""
    run_dir = Path(options.target)
    found = read_run(run_dir)
    page = write_report(run_dir) if options.output is None else _write_page(Path(options.output), found)
    lines = (*headline(found), f"page: {page}")
    return Answer(document={"page": str(page), "report": to_json(found)}, views=("\n".join(lines),))


def _write_page(path: Path, found: Report) -> Path:
    try:
        path.write_text(render(found), encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--output {path} cannot be written", found=error.strerror or str(error)) from error
    return path
