"""The command line is a contract: an option changes only with its recorded line."""

from __future__ import annotations

import difflib

from cli_listing import listing, recorded


def test_options_are_the_recorded_ones() -> None:
    changes = list(difflib.unified_diff(recorded().splitlines(), listing().splitlines(), lineterm="", n=0))
    assert changes == [], "record a wanted change with: python tests/habits/cli_listing.py"


def test_the_listing_names_the_contract() -> None:
    lines = listing()
    for needed in (
        "plan --devices",
        "plan --batch-size",
        "train --strategy",
        "train --steps",
        "verify --json",
        "compare TARGET",
        "report --json",
        "calibrate --json",
        "doctor --json",
        "inspect TARGET",
    ):
        assert f"\n{needed} " in f"\n{lines}", needed
