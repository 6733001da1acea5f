"""GPUDirect Storage was asked for, and the library read through host memory: compatibility mode.

The bytes come by system calls of the library's own threads, at most a handful of them, through
bounce buffers, and are then copied to the GPU. What that costs is not measured here: it is a
warning, whatever the share.
"""

from __future__ import annotations

from kvprobe.correlator.gds import DataPath
from kvprobe.correlator.ledger import Ledger
from kvprobe.findings import Detector
from kvprobe.findings._weigh import confidence, engine_name, unmeasured_severity
from kvprobe.model import Evidence, Finding

MIN_CALLS = 30
COMPAT_SHARE = 0.1
"""Of the bytes: less may be what no GPU path can take, unaligned ends and tails of files."""
CERTAIN_COMPAT_SHARE = 0.9


def _detect(ledger: Ledger) -> list[Finding]:
    if ledger.gds is None:
        return []
    both = (ledger.gds.reads, ledger.gds.writes)
    calls = sum(each.calls - each.nameless_calls for each in both)
    whole = sum(each.named_bytes for each in both)
    below = sum(each.below_bytes for each in both)
    if ledger.gds.path not in (DataPath.COMPAT, DataPath.MIXED):
        return []  # direct system calls may be peer-to-peer DMA, where that is switched on
    if calls < MIN_CALLS or below < COMPAT_SHARE * whole:
        return []
    inner = sum(each.below_ops for each in both)
    driver = ledger.gds.driver
    counted = [n for n in (driver.read_bytes, driver.write_bytes) if n is not None]
    return [
        Finding(
            slug="gds_compat_mode",
            severity=unmeasured_severity(None),
            confidence=confidence(calls, below / whole, COMPAT_SHARE, CERTAIN_COMPAT_SHARE),
            subject=engine_name(ledger),
            evidence=(
                Evidence(
                    "share of cuFile bytes moved by system calls", below / whole, "share", calls
                ),
                Evidence("bytes of cuFile calls", whole, "B", calls),
                Evidence("system calls for one cuFile call", inner / calls, "", calls),
                Evidence(
                    "driver nvidia-fs is loaded",
                    None if driver.loaded is None else float(driver.loaded),
                    "",
                    calls,
                ),
                Evidence(
                    "bytes that nvidia-fs counted", sum(counted) if counted else None, "B", calls
                ),
            ),
            would_disprove="nvidia-fs counting the same bytes; or peer-to-peer DMA of the kernel "
            "switched on in cufile.json and reported by gdscheck, whose reads are system calls too",
        )
    ]


DETECTOR = Detector("gds_compat_mode", "GPUDirect Storage read through host memory", _detect)
