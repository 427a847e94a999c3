"""The recorded command line; `python tests/habits/cli_listing.py` records it anew."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from apportion.cli import COMMANDS
from apportion.cli_options import flag_of
from apportion.cli_schema import choices_of

TABLE = Path(__file__).parent.parent / "tables" / "cli_options.txt"


def listing() -> str:
    """Return every command and option with its default and choices, one a line."""
    lines = []
    for command in COMMANDS:
        for field, info in command.options.model_fields.items():
            key = info.alias or field
            name = "TARGET" if key == "target" else flag_of(key)
            choices = choices_of(info.annotation)
            shown = f"  one of {', '.join(choices)}" if choices else ""
            lines.append(f"{command.name} {name}  default {info.default!r}{shown}")
    return "\n".join(lines) + "\n"


def recorded() -> str:
    """Return the recorded listing without the comment at its head."""
    lines = TABLE.read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("# "))


if __name__ == "__main__":
    origin = (
        f"# The options of every command, {date.today().isoformat()}.\n"
        "# Recorded by: python tests/habits/cli_listing.py\n"
    )
    TABLE.write_text(origin + listing(), encoding="utf-8")
