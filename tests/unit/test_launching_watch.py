"""What the launcher reads of its ranks."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from apportion.errors import OptionError
from apportion.launching.network import check_port, gloo_interface, loopback_interface
from apportion.launching.stopping import SAME_KEY_SECONDS, StopRequest
from apportion.launching.watch import Lines, Tail, behind, is_alive, place_of
from apportion.records import Event, Phase, to_json_text


def event(rank: int, step: int, phase: Phase) -> Event:
    return Event(time=0.0, rank=rank, pid=1, step=step, phase=phase)


def test_tail_gives_each_text_once(tmp_path: Path) -> None:
    file = tmp_path / "log"
    tail = Tail(file)
    assert tail.read() == ""
    file.write_text("one")
    assert tail.read() == "one"
    assert tail.read() == ""
    with file.open("a") as more:
        more.write(" two")
    assert tail.read() == " two"


def test_tail_skips_what_is_there_and_follows_a_replaced_file(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("old")
    tail = Tail(file, from_end=True)
    assert tail.read() == ""
    file.rename(tmp_path / "kept")
    file.write_text("new")
    assert tail.read() == "new"


def test_tail_waits_for_the_rest_of_a_character(tmp_path: Path) -> None:
    file = tmp_path / "log"
    data = "a€b".encode()
    tail = Tail(file)
    file.write_bytes(data[:2])
    assert tail.read() == "a"
    file.write_bytes(data)
    assert tail.read() == "€b"


def test_lines_waits_for_the_end_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / "rank-0.jsonl"
    lines = Lines(file, Event)
    first = event(0, 1, Phase.STEP)
    text = to_json_text(first, indent=None) + "\n"
    file.write_text(text + text[:10])
    assert lines.read() == (first,)
    file.write_text(text + text)
    assert lines.read() == (first,)


def test_behind_are_those_that_are_least_far() -> None:
    waiting, loading, done = event(0, 5, Phase.STEP), event(1, 5, Phase.DATA), event(2, 9, Phase.END)
    assert behind({0: waiting, 1: loading, 2: done}, 3) == [1]
    assert behind({0: waiting, 1: event(1, 5, Phase.STEP)}, 2) == [0, 1]
    assert behind({0: waiting}, 3) == [1, 2]


def test_places_in_words() -> None:
    assert place_of(None) == "starting"
    assert place_of(event(0, 3, Phase.DATA)) == "loading the data of step 3"
    assert place_of(event(0, 3, Phase.STEP)) == "in step 3"


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OptionError, match=f"port {port} cannot be used"):
            check_port(port)
    check_port(0)
    with pytest.raises(OptionError, match="does not exist"):
        check_port(70000)


def test_a_host_name_that_leads_nowhere_needs_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(*args: object, **options: object) -> list[object]:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    assert gloo_interface() == loopback_interface()

    def elsewhere(*args: object, **options: object) -> list[object]:
        # TEST-NET-1 (RFC 5737) is nobody's address.
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("192.0.2.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", elsewhere)
    assert gloo_interface() == loopback_interface()

    def here(*args: object, **options: object) -> list[object]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", here)
    assert gloo_interface() == ""


def test_only_a_second_ctrl_c_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import signal
    import time

    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    request = StopRequest()
    request.handle(signal.SIGTERM, None)
    assert (request.save, request.at_once) == (True, False)
    request.handle(signal.SIGINT, None)  # the same key press, passed on by a wrapper
    assert not request.at_once
    now[0] += 2 * SAME_KEY_SECONDS
    request.handle(signal.SIGTERM, None)
    assert not request.at_once
    request.handle(signal.SIGINT, None)
    assert request.at_once


def test_a_process_that_is_gone_is_not_alive() -> None:
    import os
    import subprocess
    import sys

    child = subprocess.Popen([sys.executable, "-c", "pass"])
    child.wait()
    assert is_alive(os.getpid())
    assert not is_alive(child.pid)
