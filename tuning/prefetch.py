"""Restores that begin while a request queues; read-ahead that fits the reads."""

import math
from collections.abc import Sequence

from kvprobe.api import (
    Effect,
    Facts,
    Finding,
    Proposal,
    Tuner,
    in_words,
    setting,
    share,
    size,
)

KNOB = "prefetch_horizon"
MAX_HORIZON = 8
"""Requests ahead of the scheduler; more would fill host memory with what may be evicted unused."""
MIN_READ_AHEAD_BYTES = 16384
"""Never 0: then each page of a buffered read is one device request."""
PAGE_BYTES = 4096

# The evidence of late_prefetch and readahead_waste that the effects are taken from.
AT_MOST = "share of time to first token an earlier start saves, at most"
EXPECTED = "share of time to first token an earlier start saves, expected"
AT_LEAST = "share of time to first token an earlier start saves, at least"
WASTED = "share of bytes the device read that nobody asked for"


def propose(findings: Sequence[Finding], facts: Facts) -> list[Proposal]:
    """An earlier start for late restores, a smaller window for wasted read-ahead."""
    proposals = []
    for finding in findings:
        if finding.slug == "late_prefetch":
            proposals += _earlier(finding, facts)
        elif finding.slug == "readahead_waste":
            proposals += _smaller_window(finding, facts)
    return proposals


def _earlier(finding: Finding, facts: Facts) -> list[Proposal]:
    engine = facts.engine
    most, mid, least = (_figure(finding, metric) for metric in (AT_MOST, EXPECTED, AT_LEAST))
    if most is None or mid is None or least is None or (engine is not None and engine.prefetch):
        return []
    horizon = _horizon(facts)
    said = setting(facts, KNOB, horizon)
    return [
        Proposal(
            slug=TUNER.name,
            finding=finding.slug,
            knob=KNOB,
            target=engine.name if engine else "engine",
            current=0 if engine is not None and engine.prefetch is False else None,
            proposed=horizon,
            unit="requests",
            reason="storage was idle while requests queued; a restore that begins in the queue "
            f"is hidden behind it ({share(least)} of the time to first token at least), and slots "
            "that need not wait for restores shorten the queue itself",
            effect=Effect("ttft_ns", -most, -mid, -least),
            risk="restored units wait in host memory and may be evicted before they are used; "
            "requests that are cancelled in the queue have read for nothing",
            live=said is not None and said.live,
            apply=in_words(said, KNOB, horizon),
            undo=in_words(setting(facts, KNOB, 0), KNOB, 0),
            give_up=f"time to first token falls by less than {share(least / 2)} in an A B B A run",
        )
    ]


def _horizon(facts: Facts) -> int:
    """Predecessors whose service covers one restore: enough to hide it, and no more."""
    restore, wait = facts.restore, facts.queue_ns_per_restore
    if restore is None or restore.n <= 0:
        return 1
    takes = restore.restore_ns / restore.n
    serves = restore.ttft_ns / restore.n - takes - (wait.mid if wait else 0.0)
    return min(max(1, math.ceil(takes / serves)), MAX_HORIZON) if serves > 0 else 1


def _smaller_window(finding: Finding, facts: Facts) -> list[Proposal]:
    device, restore = facts.device, facts.restore
    wasted = _figure(finding, WASTED)
    now = device.read_ahead_bytes if device else None
    if device is None or restore is None or restore.ops <= 0 or not now or wasted is None:
        return []
    read = restore.bytes / restore.ops
    window = _window(read)
    if window >= now:
        return []
    path = f"/sys/block/{device.name}/queue/read_ahead_kb"
    return [
        Proposal(
            slug=TUNER.name,
            finding=finding.slug,
            knob="read_ahead_bytes",
            target=device.name,
            current=now,
            proposed=window,
            unit="B",
            reason=f"reads of {size(read)} in windows of {size(now)}: {share(wasted)} of what the "
            "device read was asked for by nobody",
            effect=Effect("device_read_bytes", -wasted, -wasted * (1 - window / now), 0.0),
            risk="other buffered readers of this device get the smaller window too; files that "
            "are open keep the old one",
            live=True,
            apply=f"echo {window >> 10} > {path}",
            undo=f"echo {now >> 10} > {path}",
            give_up="restores take longer, or the device reads as much as before",
        )
    ]


def _window(read_bytes: float) -> int:
    """The smallest power of two of bytes that holds a whole read."""
    pages = max(1, math.ceil(read_bytes / PAGE_BYTES))
    return max(MIN_READ_AHEAD_BYTES, PAGE_BYTES << (pages - 1).bit_length())


def _figure(finding: Finding, metric: str) -> float | None:
    return next((e.value for e in finding.evidence if e.metric == metric), None)


TUNER = Tuner("prefetch", ("late_prefetch", "readahead_waste"), propose)
