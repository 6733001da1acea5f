"""Addresses that kvprobe itself listens on, and what to say when it cannot."""

from __future__ import annotations

import errno
import os

from kvprobe.errors import KvprobeError

LOOPBACK = "127.0.0.1"


def parse_address(kind: str, text: str) -> tuple[str, int]:
    """Host and port of ``[HOST:]PORT``; the host is the loopback one where none is written.

    Raises:
        KvprobeError: it is no such address.
    """
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if host == "*" or not (port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16):
        raise KvprobeError(
            f"{kind}:{text} is no address to listen on", f"{kind}:PORT or {kind}:HOST:PORT"
        )
    return LOOPBACK if host in ("", "localhost") else host, int(port)


def cannot_listen(where: str, port: int | None, number: int | None, instead: str) -> KvprobeError:
    """The error for an address that cannot be listened on, with who has it.

    Args:
        where: the address in words.
        port: its TCP port; None where it has none.
        number: the errno.
        instead: what to do if it is taken.
    """
    if number == errno.EADDRINUSE:
        return KvprobeError(f"{where} is taken{_by_whom(port)}", instead)
    why = os.strerror(number) if number else "no such host"
    return KvprobeError(f"cannot listen on {where}: {why}", "name an address of this machine")


def _by_whom(port: int | None) -> str:
    """`` by NAME (PID n)`` of the process that listens on a TCP port; empty where hidden."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if (
                connection.pid
                and connection.status == psutil.CONN_LISTEN
                and connection.laddr[1:2] == (port,)
            ):
                return f" by {psutil.Process(connection.pid).name()} (PID {connection.pid})"
    except (psutil.Error, OSError):
        pass
    return ""
