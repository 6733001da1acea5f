"""Facts of a capture whose restores can be worked out by hand."""

from __future__ import annotations

from kvprobe.model import EngineFacts, Facts, RestoreSample, ServiceCell

KIB = 1024
US = 1_000
UNIT = 64 * KIB
READS = 16
N = 101


def exact(size: int, depth: int, read_ns: float, source: str = "sweep") -> ServiceCell:
    """A cell in which each of ``depth`` reads takes ``read_ns``; no interval."""
    rate = depth * size / read_ns * 1e9
    return ServiceCell(size, depth, True, rate, rate, rate, 3, source)


def made(
    cells: list[ServiceCell],
    read_ns: int = 100 * US,
    pause_ns: int = 0,
    software_ns: int = 0,
    depth: float = 1.0,
    at_once: float | None = None,
    reads_in_flight: int | None = None,
) -> Facts:
    """Restores of 16 reads of 64 KiB; each read takes ``read_ns``, then ``pause_ns`` pass."""
    ops = N * READS
    restore_ns = round(ops * (read_ns + pause_ns) / depth)
    return Facts(
        engine=EngineFacts(
            "x",
            unit_bytes=UNIT,
            bytes_per_token=1024,
            direct=True,
            reads_in_flight=reads_in_flight,
        ),
        device=None,
        restore=RestoreSample(
            n=N,
            bytes=ops * UNIT,
            ops=ops,
            restore_ns=restore_ns,
            device_ns=round(ops * (read_ns - software_ns) / depth),
            block_queue_ns=0,
            software_ns=round(ops * software_ns / depth),
            idle_ns=round(ops * pause_ns / depth),
            ttft_ns=restore_ns + N * 20_000 * US,
            effective_depth=depth,
            restoring_at_once=at_once,
        ),
        surface=tuple(cells),
    )


FLAT = [exact(UNIT, depth, 100 * US) for depth in (1, 2, 4, 8)]
"""A device that serves eight reads as fast as one."""
