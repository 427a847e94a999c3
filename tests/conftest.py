"""Puts `tests/` on the import path, so that every test finds `ranks`."""
