"""What a command answers: a document for --json, views for a terminal, and the error it ends with."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import ApportionError


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`document` is a record or plain data, None on a rank that leaves the answer to rank 0.

    `views` are drawn by rich, one below the other.
    `notes` go to stderr. `error` is printed last and gives the exit code; the document is shown all the same.
    """

    document: object
    views: tuple[object, ...] = ()
    notes: tuple[str, ...] = ()
    error: ApportionError | None = None
