"""`doctor`, `calibrate` and `report`."""

from __future__ import annotations

from pathlib import Path

from .cli_answer import Answer
from .cli_schema import DoctorOptions
from .errors import ApportionError
from .records import CheckStatus


def doctor(options: DoctorOptions) -> Answer:
    """Answer with the checks of this machine; an error ends it if one is a problem."""
    from .doctoring import check_machine
    from .reporting import doctor_table

    checks = check_machine(port=options.port, run_dir=Path(options.run_dir))
    problems = [check for check in checks if check.status is CheckStatus.PROBLEM]
    error = None
    if problems:
        names = ", ".join(check.name for check in problems)
        error = ApportionError(
            f"this machine needs mending: {names}", found=problems[0].found, try_=problems[0].fix
        )
    return Answer(document=checks, views=(doctor_table(checks),), error=error)
