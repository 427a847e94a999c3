"""Ports and interfaces of this host."""

from __future__ import annotations

import socket

from ..errors import OptionError

LOOPBACK = "127.0.0.1"


def check_port(port: int) -> None:
    """Return if nobody listens on `port` of this host; 0 stands for "any free one".

    Raises: OptionError if it is in use, needs rights that we lack or is no port.
    """
    if not 0 <= port < 2**16:
        raise OptionError(
            f"port {port} does not exist", try_="a port between 1024 and 65535, or 0 for a free one"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise OptionError(
                f"port {port} cannot be used",
                found=str(error),
                try_="another port, or none: a free one is then taken; `ss -ltnp` shows who has it",
            ) from None


def loopback_interface() -> str:
    """Return the name of the loopback interface ("lo"), or "" if there is none."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), "")


def gloo_interface() -> str:
    """Return the interface that gloo must be told for ranks of this host, or "" where it finds one itself.

    Gloo binds the address that the host's own name resolves to, and fails or waits where that is nobody's or
    another machine's.
    """
    try:
        for family, kind, _, _, address in socket.getaddrinfo(
            socket.gethostname(), 0, family=socket.AF_INET, type=socket.SOCK_STREAM
        ):
            with socket.socket(family, kind) as probe:
                probe.bind(address)
                return ""
    except OSError:
        return loopback_interface()
    return loopback_interface()
