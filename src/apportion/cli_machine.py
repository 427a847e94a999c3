"""`doctor`, `calibrate` and `report`."""

from __future__ import annotations

from pathlib import Path

from .cli_answer import Answer
from .cli_schema import DoctorOptions, ReportOptions
from .doctoring import check_machine
from .errors import ApportionError, OptionError
from .records import CheckStatus, Report, to_json
from .reporting import doctor_table
from .reporting.html import render, write_report
from .reporting.runs import read_run
from .reporting.verdict import headline


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


def report(options: ReportOptions) -> Answer:
    """Write the page of a run and answer with what it says."""
    run_dir = Path(options.target)
    found = read_run(run_dir)
    page = write_report(run_dir) if options.output is None else _write_page(Path(options.output), found)
    lines = (*headline(found), f"page: {page}")
    return Answer(document={"page": str(page), "report": to_json(found)}, views=lines)


def _write_page(path: Path, found: Report) -> Path:
    try:
        path.write_text(render(found), encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--output {path} cannot be written", found=error.strerror or str(error)) from error
    return path
