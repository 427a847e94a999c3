"""Of several ranks that ended badly, the one that explains the others is shown."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from apportion.errors import ParityError, RankError, RefusedError
from apportion.launching.failures import Ended, error_file_text, error_of, failure_in, first_ended
from apportion.records import Failure

TRACE = 'Traceback (most recent call last):\n  File "job.py", line 7, in loss\n    boom()\nValueError: bad\n'


def said(rank: int, time: float, *, kind: str = "ValueError", peer: bool = False, what: str = "bad") -> Failure:
    return Failure(rank=rank, host="h", time=time, kind=kind, what=what, traceback=TRACE, peer=peer)


def ended(rank: int, code: int, failure: Failure | None = None, *, by_us: bool = False) -> Ended:
    return Ended(rank=rank, exit_code=code, said=failure, log=Path("/nowhere/stderr.log"), ended_by_us=by_us)


RAISED = ended(2, 5, said(2, 10.0))
RAISED_LATER = ended(0, 5, said(0, 11.0))
KILLED = ended(3, -9)
LEFT = ended(4, 7)
LOST_PEER = ended(1, 5, said(1, 9.0, kind="RuntimeError", peer=True))
TERMINATED = ended(5, -15)
GAVE_UP = ended(6, 143)
KILLED_BY_US = ended(7, -9, by_us=True)


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ([LOST_PEER, RAISED_LATER, RAISED], RAISED),
        ([LOST_PEER, KILLED, TERMINATED], KILLED),
        ([GAVE_UP, LOST_PEER, LEFT], LEFT),
        ([KILLED_BY_US, TERMINATED, GAVE_UP, LOST_PEER], LOST_PEER),
        ([KILLED_BY_US, RAISED_LATER], RAISED_LATER),
    ],
)
def test_the_cause_is_first_in_any_order(ends: list[Ended], first: Ended) -> None:
    for order in itertools.permutations(ends):
        assert first_ended(order) is first


def test_an_exception_names_rank_host_type_and_place() -> None:
    error = error_of(RAISED)
    assert isinstance(error, RankError)
    assert error.what == "rank 2 on h failed: ValueError: bad"
    assert 'File "job.py", line 7, in loss' in error.found
    assert error.__notes__ == [TRACE]


@pytest.mark.parametrize("kind", [RefusedError, ParityError])
def test_our_errors_come_back_as_themselves(kind: type[RefusedError] | type[ParityError]) -> None:
    failure = Failure(rank=1, host="h", time=1.0, kind=kind.__name__, what="w", found="f", try_="t")
    error = error_of(ended(1, kind.exit_code, failure))
    assert type(error) is kind
    assert (error.what, error.found, error.try_) == ("w", "f", "t")


def test_a_signal_is_named_with_the_place() -> None:
    error = error_of(KILLED, place="in step 12")
    assert "rank 3" in error.what
    assert "signal 9 (SIGKILL)" in error.what
    assert error.found == "it was in step 12"


def test_an_exit_without_a_word_shows_the_end_of_stderr(tmp_path: Path) -> None:
    log = tmp_path / "stderr.log"
    log.write_text("\n".join(f"line {number}" for number in range(100)))
    error = error_of(Ended(rank=4, exit_code=7, said=None, log=log))
    assert "exit code 7" in error.what
    assert "line 99" in error.found
    assert "line 1\n" not in error.found


def test_a_lost_connection_alone_is_said_to_be_that() -> None:
    assert "lost the connection" in error_of(LOST_PEER).what


def test_error_file_round_trip() -> None:
    failure = said(2, 10.5)
    data = json.loads(error_file_text(failure))
    assert failure_in(data) == failure
    assert data["message"]["extraInfo"]["timestamp"] == "10"
    assert failure_in({"message": "somebody else's"}) is None
