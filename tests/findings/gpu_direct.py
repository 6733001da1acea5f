"""Ledgers with GPUDirect Storage: compatibility mode, and paths on which nothing is wrong."""

from __future__ import annotations

from dataclasses import replace

from kvprobe.correlator.gds import DataPath, Driver, GpuDirect, Transfers
from kvprobe.correlator.ledger import Ledger
from tests.findings.ledgers import MIB, N, healthy

NONE = Transfers(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def reads(calls: int, below_share: float) -> Transfers:
    """Reads of 16 MiB, so many of whose bytes came by system calls of 1 MiB."""
    whole = calls * 16 * MIB
    below = round(whole * below_share)
    return replace(NONE, calls=calls, bytes=whole, below_ops=below // MIB, below_bytes=below)


def through(made: Transfers, driver: Driver, path: DataPath = DataPath.COMPAT) -> GpuDirect:
    return GpuDirect(path, "", made, NONE, driver)


def native(n: int = N) -> Ledger:
    """The driver counts the bytes; the tails of files, a twentieth, come by system calls."""
    made = reads(n * 8, 0.05)
    driver = Driver(True, n * 8, made.bytes * 19 // 20, 0, 0, 0)
    return healthy(n, gds=through(made, driver, DataPath.NATIVE))


def unseen(n: int = N) -> Ledger:
    made = replace(reads(n * 8, 0), unseen_calls=n * 8, unseen_bytes=n * 8 * 16 * MIB)
    return healthy(n, gds=through(made, Driver(None), DataPath.UNKNOWN))


def gds_compat_mode(n: int = N) -> Ledger:
    return healthy(n, gds=through(reads(n * 8, 1.0), Driver(False)))


def maybe_peer_to_peer(n: int = N) -> Ledger:
    """Direct system calls, and peer-to-peer DMA is switched on: either may be the case."""
    return healthy(n, gds=through(reads(n * 8, 1.0), Driver(False), DataPath.UNKNOWN))


HEALTHY = (native, unseen, maybe_peer_to_peer)
ILL = (gds_compat_mode,)
