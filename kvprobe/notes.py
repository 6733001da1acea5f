"""What a reader must know before the figures of a window: one sentence each."""

from __future__ import annotations

from kvprobe import units
from kvprobe.correlator.gds import GpuDirect
from kvprobe.correlator.ledger import Ledger
from kvprobe.model import GpuSampling
from kvprobe.sources.nvme import short_address


def left_out(ledger: Ledger) -> list[str]:
    """What the join left out, one sentence each."""
    said = []
    if ledger.outside_requests:
        outside = units.counted(ledger.outside_requests, "request was", "requests were")
        said.append(f"{outside} over before the window or came after it: left out")
    start, end = ledger.window_ns
    cut = sum(0 <= a.arrival_ns < start for a in ledger.accounts)
    if cut:
        arrived = units.counted(cut, "request", "requests")
        said.append(f"{arrived} arrived before the window: the parts are unknown")
    late = sum(a.arrival_ns + (a.ttft_ns or 0) > end for a in ledger.accounts)
    if late:
        told = units.counted(late, "request", "requests")
        said.append(f"{told} had the first token after the window: the parts are unknown")
    vague = sum(a.vague for a in ledger.accounts)
    if vague:
        said.append(
            f"{units.counted(vague, 'request has', 'requests have')} times too uncertain to say "
            "what was read, and when: OpenTelemetry spans of the engine would tell"
        )
    if any(a.restore and a.restore.device_ns is None for a in ledger.accounts):
        why = (
            "filtered out" if not _unseen(ledger.gds) else "missing, as GPUDirect Storage has none"
        )
        said.append(f"block rows of KV reads were {why}: where restores waited is unknown")
    return said


def compared(ledger: Ledger) -> list[str]:
    """The engine's own counters beside kvprobe's figures, where both are there."""
    said = []
    for total in ledger.totals:
        if total.seen is None:
            continue
        what = {"read_bytes": "bytes read", "chunk_hits": "files found"}.get(total.name, total.name)
        counted = f"{total.engine} counted {total.counted:,} {what}"
        if total.seen == total.counted:
            said.append(f"{counted}, and so did kvprobe")
        elif total.name == "chunk_hits" and total.seen > total.counted:
            # An engine also tests, before it stores a chunk, whether somebody has done so.
            said.append(
                f"{counted} by look-ups; kvprobe saw {total.seen:,} tests of files that were "
                "there, those before stores among them"
            )
        else:
            said.append(f"{counted} from page to page, kvprobe saw {total.seen:,} in the window")
    return said


def outages(ledger: Ledger) -> list[str]:
    """Paths that were lost in the window, one sentence each."""
    said = []
    for device in ledger.devices:
        path = device.path
        if path is None or not path.outages:
            continue
        name = short_address(path.facts.address) or path.facts.name
        first, back = path.outages[0]
        sentence = f"path {name} ({path.facts.name}) was lost at +{_after(first, ledger)}"
        if len(path.outages) > 1:
            last, back = path.outages[-1]
            sentence += f", {len(path.outages)} times in all, last at +{_after(last, ledger)}"
            first = last
        if back is None:
            said.append(f"{sentence}, and not back at the end of the window")
        else:
            said.append(f"{sentence}, back after {units.duration(back - first)}")
    return said


def _after(time_ns: int, ledger: Ledger) -> str:
    return units.duration(max(0, time_ns - ledger.window_ns[0]))


MOST_XIDS = 3


def gpus(sampling: GpuSampling | None, ledger: Ledger) -> list[str]:
    """What befell the GPUs, or why they were not seen where there should be some."""
    said = list(sampling.notes) if sampling else []
    blind = sampling.why_none if sampling and sampling.expected else None
    if blind and not any(blind in note for note in said):
        said.append(f"GPUs were not sampled: {blind}")
    xids = sorted((x.time_ns, x.number, g.facts.index) for g in ledger.gpus for x in g.xids)
    for time_ns, number, index in xids[:MOST_XIDS]:
        said.append(f"GPU {index} reported the error Xid {number} at +{_after(time_ns, ledger)}")
    if len(xids) > MOST_XIDS:
        said.append(f"{units.counted(len(xids) - MOST_XIDS, 'more Xid error', 'more Xid errors')}")
    return said


def gpu_direct(found: GpuDirect | None) -> list[str]:
    """What of GPUDirect Storage was not seen, one sentence each."""
    if found is None:
        return []
    said = []
    for name, side in (("reads", found.reads), ("writes", found.writes)):
        if side.unseen_bytes:
            said.append(
                f"{units.size(side.unseen_bytes)} of {units.size(side.bytes)} of cuFile {name} had "
                "neither a system call nor a block request: GPUDirect Storage took them past both, "
                "and the figures of devices lack them"
            )
        if side.nameless_calls:
            said.append(
                f"{side.nameless_calls:,} cuFile {name} of {units.size(side.nameless_bytes)} have "
                "no file: their handles are older than the recording. Record from before the "
                "engine starts"
            )
        if side.handed_over:
            said.append(
                f"{side.handed_over:,} cuFile {name} of {units.size(side.handed_over_bytes)} went "
                "through streams or batches: they are counted when handed over, and not timed"
            )
    return said


def _unseen(found: GpuDirect | None) -> bool:
    return found is not None and bool(found.reads.unseen_bytes)
