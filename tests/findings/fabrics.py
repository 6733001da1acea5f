"""Ledgers of simulated NVMe fabrics: healthy ones, and one with each fault that is looked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from kvprobe.correlator import Ledger, correlate
from tests.correlator.fabric_node import KIB, MS, START_NS, US, FabricNode
from tests.findings.ledgers import N

EXTRA_NS = 900 * US
STALL_NS = 9 * MS
Case = Callable[..., Ledger]
FAULTS: dict[str, dict[str, Any]] = {
    "queue_starved": {"one_at_a_time": True, "concurrency": 4},
    "queue_saturated": {
        "queue_size": 15, "io_queues": 2, "in_flight": 16, "concurrency": 6, "reads": 32,
        "prefill_ns": 2 * MS,
    },
    "queue_imbalance": {"paths": 2, "policy": "numa", "in_flight": 8},
    # A segment is lost about every 30 ms.
    "fabric_congestion": {
        "stalls": tuple((START_NS + 30 * MS * k + k * k * 77 * US, STALL_NS) for k in range(1, 13))
    },
    "slow_path": {"paths": 2, "extra_ns": (0, EXTRA_NS)},
    "split_requests": {"unit_bytes": 512 * KIB, "max_bytes": 32 * KIB},
    "cpu_bound_transport": {"receive_factor": 12.0},
}  # fmt: skip


def made(n: int = N, **fault: Any) -> Ledger:
    """The ledger of ``n`` requests on a fabric with this fault; do not change it."""
    return _made(n, tuple(sorted(fault.items())))


@lru_cache(maxsize=64)
def _made(n: int, fault: tuple[tuple[str, Any], ...]) -> Ledger:
    return correlate(FabricNode(requests=n, **dict(fault)).run().capture())


def one_path(n: int = N) -> Ledger:
    return made(n)


def two_paths(n: int = N) -> Ledger:
    return made(n, paths=2)


def two_paths_under_load(n: int = N) -> Ledger:
    return made(n, paths=2, in_flight=8, concurrency=4)


def standing_by(n: int = N) -> Ledger:
    """The second path is for the day on which the first one fails; there is little to share out."""
    return made(n, paths=2, policy="numa", in_flight=2, concurrency=2)


def without_stamps(n: int = N) -> Ledger:
    return made(n, paths=2, stamps=False)


def queue_starved(n: int = N) -> Ledger:
    return made(n, **FAULTS["queue_starved"])


def queue_saturated(n: int = N) -> Ledger:
    return made(n, **FAULTS["queue_saturated"])


def queue_imbalance(n: int = N) -> Ledger:
    return made(n, **FAULTS["queue_imbalance"])


def fabric_congestion(n: int = N) -> Ledger:
    return made(n, **FAULTS["fabric_congestion"])


def slow_path(n: int = N) -> Ledger:
    return made(n, **FAULTS["slow_path"])


def split_requests(n: int = N) -> Ledger:
    return made(n, **FAULTS["split_requests"])


def cpu_bound_transport(n: int = N) -> Ledger:
    return made(n, **FAULTS["cpu_bound_transport"])


def one_io_queue(n: int = N) -> Ledger:
    return made(n, io_queues=1, in_flight=8)


HEALTHY = (one_path, two_paths, two_paths_under_load, standing_by, without_stamps)
ILL = (
    queue_starved,
    queue_saturated,
    queue_imbalance,
    fabric_congestion,
    slow_path,
    split_requests,
    cpu_bound_transport,
)
