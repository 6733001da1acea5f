"""What lies before the window, and rows that a filter left out: unknown, never a wrong number."""

from __future__ import annotations

from dataclasses import replace

from kvprobe.capture.frames import select
from kvprobe.capture.tables import FixedTables
from kvprobe.correlator import Ledger, correlate
from kvprobe.document import assemble
from kvprobe.findings import detect_all
from kvprobe.model import Filters, Verdict

from .simulate import Node


def later(tables: FixedTables, start_ns: int) -> Ledger:
    """The same rows, recorded from ``start_ns`` on."""
    frames = {n: tables.frame(n) for n in ("requests", "ops", "block", "lookups")}
    for name, column in (("ops", "start_ns"), ("block", "done_ns"), ("lookups", "start_ns")):
        kept = frames[name][column] >= start_ns
        frames[name] = {c: values[kept] for c, values in frames[name].items()}
    manifest = replace(tables.manifest, start_ns=start_ns)
    return correlate(FixedTables(manifest, frames))


def test_requests_that_were_over_before_the_window_are_left_out() -> None:
    tables = Node(5, 4).run().capture()
    requests = tables.frame("requests")
    start = int(sorted(requests["first_token_ns"])[100]) + 1
    ledger = later(tables, start)
    assert ledger.outside_requests == 101
    assert len(ledger.accounts) == 211 - 101
    notes = assemble(ledger, tables.manifest, [], [])["capture"]["notes"]
    assert any("101 requests were over before" in note for note in notes)


def test_a_request_that_began_before_the_window_has_unknown_parts() -> None:
    tables = Node(5, 4).run().capture()
    start = int(sorted(tables.frame("requests")["first_token_ns"])[100]) + 1
    ledger = later(tables, start)
    early = [a for a in ledger.accounts if a.arrival_ns < start]
    assert early
    for account in early:
        assert account.spans is None and account.restore is None
        assert account.verdict == Verdict.UNKNOWN
    assert all(a.spans and a.restore for a in ledger.accounts if a.arrival_ns >= start)


def test_what_happened_after_the_window_is_not_judged() -> None:
    """Signals are waited for; the kernel is not watched any more."""
    tables = Node(5, 4).run().capture()
    requests = tables.frame("requests")
    arrival = sorted(requests["arrival_ns"].tolist())
    end = arrival[150]
    frames = {n: tables.frame(n) for n in ("requests", "ops", "block", "lookups")}
    for name, column in (("ops", "end_ns"), ("block", "done_ns"), ("lookups", "end_ns")):
        frames[name] = select(frames[name], frames[name][column] <= end)
    manifest = replace(tables.manifest, end_ns=end)
    ledger = correlate(FixedTables(manifest, frames))
    assert len(ledger.accounts) == 151 and ledger.outside_requests == 60
    late = [a for a in ledger.accounts if a.arrival_ns + (a.ttft_ns or 0) > end]
    assert 1 <= len(late) <= 4, "as many as are served at once"
    assert all(a.spans is None and a.verdict == Verdict.UNKNOWN for a in late)
    whole = {a.id: a for a in correlate(tables).accounts}
    done = [a for a in ledger.accounts if a not in late]
    assert [a.spans for a in done] == [whole[a.id].spans for a in done]
    notes = assemble(ledger, manifest, [], [])["capture"]["notes"]
    noun = "request" if len(late) == 1 else "requests"
    assert any(note.startswith(f"{len(late)} {noun} had the first token after") for note in notes)


def test_rows_that_a_filter_left_out_make_the_split_unknown() -> None:
    tables = Node(5, 1).run().capture()
    whole = correlate(tables)
    for filters in (Filters(keep_one_in=10), Filters(min_latency_ns=1)):
        manifest = replace(tables.manifest, filters=filters)
        frames = {n: tables.frame(n) for n in ("requests", "ops", "block", "lookups")}
        ledger = correlate(FixedTables(manifest, frames))
        assert ledger.restore is None
        for account, before in zip(ledger.accounts, whole.accounts, strict=True):
            assert account.restore and before.restore
            assert account.restore.device_ns is account.restore.software_ns is None
            assert account.restore.exposed_ns == before.restore.exposed_ns
            assert account.restore.idle_ns == before.restore.idle_ns
        assert "small_blocks" not in {f.slug for f in detect_all(ledger)}
    # Another device was traced: no row of these reads at all.
    frames = {n: tables.frame(n) for n in ("requests", "ops", "lookups")}
    ledger = correlate(FixedTables(tables.manifest, frames))
    assert all(a.restore and a.restore.device_ns is None for a in ledger.accounts)
