"""Kernel settings for the connections of NVMe/TCP and NFS (``/proc/sys``)."""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.knobs import Family, Knob, KnobKind, Reach, Setting, Subjects, setting
from kvprobe.sources.devices import read_text

HOST = "host"


def _connection(name: str, unit: str, meaning: str, default: str, risk: str = "") -> Knob:
    return Knob(
        name,
        Family.QUEUE_DEPTH,
        unit,
        meaning,
        Reach.RECONNECT,
        default=default,
        ignored="connections that exist, and sockets that set their own size, take no notice",
        risk=risk or "memory for each connection",
    )


_KNOBS = (
    _connection(
        "net.ipv4.tcp_rmem",
        "B",
        "least, first and largest receive buffer of a connection; bytes in flight end there",
        "4096 131072 6291456",
    ),
    _connection(
        "net.ipv4.tcp_wmem",
        "B",
        "least, first and largest send buffer of a connection",
        "4096 16384 4194304",
    ),
    _connection(
        "net.core.rmem_max", "B", "the largest receive buffer that a socket may ask for", "212992"
    ),
    _connection(
        "net.core.wmem_max", "B", "the largest send buffer that a socket may ask for", "212992"
    ),
    _connection(
        "net.core.busy_poll",
        "us",
        "how long poll() looks for packets before it sleeps; 0: not at all",
        "0",
        "takes a CPU",
    ),
    _connection(
        "net.core.busy_read",
        "us",
        "how long a read of a socket looks for packets before it sleeps; 0: not at all",
        "0",
        "takes a CPU",
    ),
)


def _read(subjects: Subjects) -> Iterator[Setting]:
    if not subjects.network:
        return
    for knob in KIND.knobs:
        source = subjects.roots.procfs / "sys" / knob.name.replace(".", "/")
        if source.exists():
            text = read_text(source)
            yield setting(knob, HOST, " ".join(text.split()) if text else None, source)


KIND = KnobKind("sysctl", "kernel settings for connections", _KNOBS, _read)
