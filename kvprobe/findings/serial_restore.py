"""One request's reads go one after another while the device could serve several."""

from __future__ import annotations

from kvprobe.correlator.ledger import Ledger
from kvprobe.findings import Detector
from kvprobe.findings._depth import (
    BUSY_DEPTH,
    MIN_READS,
    MIN_SPEED_UP,
    SERIAL_BYTES_SHARE,
    UNWITNESSED,
    busy_depth,
    from_device,
    is_serial,
    measured_speed_up,
    median,
    serial_share,
)
from kvprobe.findings._weigh import (
    MIN_REQUESTS,
    Restored,
    confidence,
    engine_name,
    restored,
    severity,
    share_of_ttft,
)
from kvprobe.model import Evidence, Finding

CERTAIN_BYTES_SHARE = 0.9


def _detect(ledger: Ledger) -> list[Finding]:
    requests = from_device(restored(ledger))
    several = [
        r for r in requests if r.restore.ops >= MIN_READS and r.restore.effective_depth is not None
    ]
    if len(several) < MIN_REQUESTS:
        return []
    serial = [r for r in several if is_serial(r)]
    share = serial_share(requests)
    exposed = sum(r.restore.exposed_ns for r in serial)
    if share < SERIAL_BYTES_SHARE or exposed <= 0:
        return []
    busy = busy_depth(ledger.kv_devices)
    speed_up, cells = measured_speed_up(ledger)
    if speed_up is not None and speed_up < MIN_SPEED_UP:
        return []
    if speed_up is None and busy is not None and busy >= BUSY_DEPTH:
        return []
    n = len(several)
    sure = confidence(n, share, SERIAL_BYTES_SHARE, CERTAIN_BYTES_SHARE)
    if busy is None and speed_up is None:
        sure = round(sure * UNWITNESSED, 3)
    depths = [r.restore.effective_depth or 0.0 for r in several]
    reads = sum(r.restore.ops for r in several)
    at_stake = share_of_ttft(
        (r.restore.exposed_ns if r.restore.ops >= MIN_READS and is_serial(r) else 0, r.account)
        for r in requests
    )
    timed = sum(1 for r in serial if r.account.ttft_ns)
    evidence = [
        Evidence("reads open at once in a restore, median", median(depths), "", n),
        Evidence("reads a restore, mean", reads / n, "", n),
        Evidence("share of restored bytes read one after another", share, "share", n),
        Evidence(
            "share of those restores with nothing outstanding below the engine",
            _above(serial, exposed),
            "share",
            len(serial),
        ),
        Evidence("share of time to first token spent in them", at_stake, "share", timed),
    ]
    if busy is not None:
        count = sum(device.reads + device.writes for device in ledger.kv_devices)
        evidence.append(Evidence("device requests outstanding while any is", busy, "", count))
    if speed_up is not None:
        evidence.append(Evidence("measured rate at more depth over now", speed_up, "x", cells))
    return [
        Finding(
            slug="serial_restore",
            severity=severity(at_stake),
            confidence=sure,
            subject=engine_name(ledger),
            evidence=tuple(evidence),
            would_disprove="a sweep in which the device reads units of this size no faster with "
            "8 reads in flight than with 1",
        )
    ]


def _above(serial: list[Restored], exposed_ns: int) -> float | None:
    """Share of these restores with nothing outstanding below the engine; None where unknown."""
    above = [
        r.restore.idle_ns + r.restore.software_ns
        for r in serial
        if r.restore.software_ns is not None
    ]
    return sum(above) / exposed_ns if len(above) == len(serial) else None


DETECTOR = Detector("serial_restore", "a request's reads go one after another", _detect)
