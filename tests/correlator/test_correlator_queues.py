"""Queue accounts against a clock that looks at every nanosecond, and against what was simulated."""

from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.capture.tables import FixedTables
from kvprobe.correlator import Ledger, correlate, queues
from kvprobe.document import Document, build
from kvprobe.model import Loss
from kvprobe.schema import FabricKind
from tests.correlator.fabric_node import (
    HEAD,
    KIB,
    MIB,
    MS,
    START_NS,
    US,
    FabricNode,
    address,
    path_device,
)

spans = st.lists(st.tuples(st.integers(-20, 120), st.integers(0, 60)), max_size=20)


def ints(values: Any) -> Any:
    return np.array(list(values), np.int64)


@given(spans, spans)
def test_depth_is_what_a_clock_sees(given_: list[Any], waits: list[Any]) -> None:
    """A window of 100 ns, looked at in the middle of each nanosecond."""
    start, end = ints(s for s, _ in given_), ints(s + n for s, n in given_)
    clock = np.arange(100) + 0.5
    level = sum(((s <= clock) & (clock < s + n)).astype(int) for s, n in given_ if s >= 0)
    level = np.zeros(100, int) + level
    seen = np.zeros(100, bool)
    for s, n in waits:
        seen |= (s <= clock) & (clock < s + n)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], seen.astype(int), [0]])))
    found = queues.depth(start, end, (0, 100), (ints(edges[::2]), ints(edges[1::2])))
    assert found.mean == pytest.approx(float(level.mean()))
    assert found.peak == int(level.max())
    assert found.p99 == int(np.quantile(level, 0.99, method="inverted_cdf"))
    if seen.any():
        assert found.waiting_mean == pytest.approx(float(level[seen].mean()))
        assert found.waiting_share(0, 0) == pytest.approx(float((level[seen] == 0).mean()))
        assert found.waiting_share(2) == pytest.approx(float((level[seen] >= 2).mean()))
    else:
        assert found.waiting_mean is found.waiting_share(0, 0) is None


@given(spans, st.integers(2, 8))
def test_who_finds_a_queue_full(given_: list[Any], size: int) -> None:
    known = [(s, n) for s, n in given_ if s >= 0]
    start, done = ints(s for s, _ in given_), ints(s + n for s, n in given_)
    found = queues.found_full_share(start, done, size)
    depth = [sum(a <= s < a + n for a, n in known) for s, _ in known]
    # A command that takes no time is not there when it begins, nor for itself.
    limit = queues.NEARLY_FULL * size
    if known:
        assert found == pytest.approx(sum(d >= limit for d in depth) / len(known))
    else:
        assert found is None


@pytest.fixture(scope="module")
def node() -> FabricNode:
    return FabricNode(requests=53, paths=2, io_queues=3, in_flight=7, queue_size=64).run()


@pytest.fixture(scope="module")
def ledger(node: FabricNode) -> Ledger:
    return correlate(node.capture())


def test_each_queue_carries_what_was_sent_over_it(node: FabricNode, ledger: Ledger) -> None:
    truth = Counter((r["controller"], r["queue"]) for r in node.tables["nvme"])
    found = {(q.controller, q.queue): q.load.commands for d in ledger.devices for q in d.queues}
    assert found == dict(truth)
    window = ledger.window_ns[1] - ledger.window_ns[0]
    for device in ledger.devices:
        for queue in device.queues:
            load = queue.load
            own = [
                r
                for r in node.tables["nvme"]
                if (r["controller"], r["queue"]) == (queue.controller, queue.queue)
            ]
            took = np.array([r["done_ns"] - r["setup_ns"] for r in own])
            assert load.bytes == sum(r["bytes"] for r in own)
            assert load.rate_per_s == pytest.approx(len(own) / window * 1e9)
            assert load.mean_depth == pytest.approx(took.sum() / window)
            assert load.latency is not None and load.latency.n == len(own)
            assert load.latency.median_ns == np.median(took)
            assert load.latency.p99_ns == pytest.approx(np.quantile(took, 0.99))
            assert queue.queue_size == 64
    shares = [q.load.share or 0 for d in ledger.devices for q in d.queues]
    assert sum(shares) == pytest.approx(1)
    assert sum((d.load.share or 0) for d in ledger.devices if d.load) == pytest.approx(1)


def test_paths_are_devices_of_one_head(ledger: Ledger) -> None:
    assert [d.head for d in ledger.kv_devices] == ["nvme0n1", "nvme0n1"]
    assert {d.facts.name for d in ledger.devices} == {"nvme0c0n1", "nvme0c1n1"}
    for device in ledger.devices:
        assert device.head_facts is not None and device.head_facts.device == HEAD
        assert device.facts.mounts == ("/kv",)
        assert device.facts.max_request_bytes is None  # that of the head is not the path's
        assert device.counted_from == "nvme"


def test_waiting_while_both_paths_are_busy_is_not_idle(ledger: Ledger) -> None:
    """No account's storage was idle for longer than no path had a command."""
    for account in ledger.accounts:
        assert account.device_before_read_ns is not None
        assert account.device_before_read_ns <= (account.first_read_ns or 0) - account.arrival_ns


def segments(ledger: Ledger) -> dict[tuple[str, ...], float]:
    return {s.parts: s.median_ns for d in ledger.devices for s in d.segments}


def test_segments_are_those_that_were_simulated() -> None:
    found = segments(correlate(FabricNode(requests=53, wire_ns=700 * US).run().capture()))
    assert found["driver",] == pytest.approx(6.5 * US, rel=0.05)
    assert found["wire_and_target",] == pytest.approx(700 * US * 1.025, rel=0.03)
    assert found["receive",] == pytest.approx(5 * US + MIB * 0.06, rel=0.02)
    assert found["completion",] == pytest.approx(4 * US, rel=0.1)
    ledger = correlate(FabricNode(requests=53).run().capture())
    for device in ledger.devices:
        assert sum(s.share for s in device.segments) == pytest.approx(1)
        rows = ledger.commands
        whole = int((rows["end_ns"] - rows["start_ns"]).sum())
        assert sum(s.total_ns for s in device.segments) == whole


def without(node: FabricNode, *columns: str) -> FixedTables:
    tables = node.capture()
    for column in columns:
        tables.frame("nvme")[column][:] = -1
    return tables


def test_segments_without_a_stamp_are_one_and_say_why() -> None:
    node = FabricNode(requests=13, stamps=False).run()
    (device,) = correlate(node.capture()).devices
    first, second = device.segments
    assert first.parts == ("driver", "wire_and_target", "receive")
    assert "nvme_tcp_try_send: this kernel has no such function" in first.why_merged
    assert "sk_data_ready" in first.why_merged
    assert (second.parts, second.why_merged) == (("completion",), "")
    whole = FabricNode(requests=13).run()
    (device,) = correlate(without(whole, "sent_ns")).devices
    assert [s.parts for s in device.segments] == [
        ("driver", "wire_and_target"), ("receive",), ("completion",)
    ]  # fmt: skip
    assert device.segments[0].why_merged == "these stamps were not recorded"
    (device,) = correlate(without(whole, "arrived_ns")).devices
    assert device.segments[1].parts == ("wire_and_target", "receive")


def test_stamps_of_some_commands_divide_those() -> None:
    tables = FabricNode(requests=13).run().capture()
    sent = tables.frame("nvme")["sent_ns"]
    sent[::7] = -1
    (device,) = correlate(tables).devices
    assert len(device.segments) == 4
    assert {s.n for s in device.segments} == {len(sent) - len(sent[::7])}


def test_stamps_out_of_order_take_no_time_back() -> None:
    """The clocks of two processors: the driver's completion a little before the first sign."""
    tables = FabricNode(requests=13).run().capture()
    rows = tables.frame("nvme")
    rows["done_ns"][:] = rows["arrived_ns"] - 7
    (device,) = correlate(tables).devices
    total = {s.parts: s.total_ns for s in device.segments}
    assert total["receive",] == 0
    assert min(total.values()) == 0
    assert sum(s.share for s in device.segments) == pytest.approx(1)


def test_a_path_that_reconnects_under_another_name_is_one() -> None:
    node = FabricNode(requests=53, paths=2, reconnect=True).run()
    numbers = {r["device"] for r in node.tables["nvme"]}
    assert numbers == {path_device(0), path_device(0) + 32, path_device(1)}
    ledger = correlate(node.capture())
    first, second = sorted(ledger.devices, key=lambda d: d.path.names if d.path else ())
    assert first.path is not None and first.path.names == ("nvme0c0n1", "nvme0c8n1")
    assert first.path.facts.address == address(0)
    assert first.numbers == (path_device(0), path_device(0) + 32)
    assert first.load is not None and second.load is not None
    assert first.load.commands + second.load.commands == len(node.tables["nvme"])
    assert abs(first.load.commands - second.load.commands) <= 1  # round-robin
    assert {q.controller for q in first.queues} == {0, 8}
    assert {q.queue_size for q in first.queues} == {128}


def test_a_number_that_another_path_took_over_is_told_by_the_controller() -> None:
    """Both paths come back, each under the number that the other one had."""
    node = FabricNode(requests=53, paths=2).run()
    middle = START_NS + 200 * MS
    swapped = {path_device(0): path_device(1), path_device(1): path_device(0)}
    begun = {r["request"]: 0 for r in node.tables["nvme"]}
    for row in node.tables["nvme"]:
        if row["setup_ns"] >= middle:
            row["controller"] += 8
            row["device"] = swapped[row["device"]]
    for row in node.tables["block"]:
        if row["queued_ns"] + US >= middle:
            row["device"] = swapped[row["device"]]
    early = node.nvme_paths()
    late = tuple(
        replace(p, controller=p.controller + 8, device=swapped[p.device], name=f"late{p.name}")
        for p in early
    )
    truth = Counter(r["controller"] % 8 for r in node.tables["nvme"])
    ledger = correlate(node.capture(nvme_paths=(*early, *late)))
    assert len(ledger.devices) == 2 and begun
    for device in ledger.devices:
        assert device.path is not None and device.load is not None
        number = device.path.facts.controller % 8
        assert device.path.facts.address == address(number)
        assert device.load.commands == truth[number]
        assert device.reads == truth[number]  # of the block rows, too


def test_events_count_for_the_path_of_their_controller() -> None:
    stalls = tuple((START_NS + 40 * MS * k, 3 * MS) for k in range(1, 6))
    ledger = correlate(FabricNode(requests=13, paths=2, stalls=stalls).run().capture())
    events = {d.facts.name: d.path.events for d in ledger.devices if d.path}
    first, second = events["nvme0c0n1"], events["nvme0c1n1"]
    assert first is not None and second is not None
    assert (first.retransmits, first.congestion_events, first.failovers) == (5, 5, 0)
    assert (second.retransmits, second.congestion_events) == (0, 0)


def test_events_of_a_disk_a_head_or_a_controller_find_their_paths() -> None:
    node = FabricNode(requests=5, paths=2, reconnect=True).run()
    other = {"value": 0, "reserved": 0, "unused": 0, "padding": 0, "time_ns": START_NS}
    node.tables["fabric"] += [
        row | other
        for row in (
            {"kind": FabricKind.FAILOVER, "device": path_device(1), "controller": 1},
            {"kind": FabricKind.FAILOVER, "device": path_device(1)},
            {"kind": FabricKind.PATH_LOST, "device": path_device(0) + 32, "controller": 8},
            {"kind": FabricKind.RECONNECT, "controller": 8},
            {"kind": FabricKind.SEND_SPACE, "controller": 0, "queue": 2, "device": HEAD},
            {"kind": FabricKind.COMMAND_TIMEOUT, "controller": 77},
            {"kind": FabricKind.COMMAND_TIMEOUT, "controller": 5, "device": path_device(1)},
        )
    ]
    events = {
        d.path.facts.address: asdict(d.path.events)
        for d in correlate(node.capture()).devices
        if d.path and d.path.events
    }
    nothing = dict.fromkeys(events[address(0)], 0)
    assert events[address(0)] == nothing | {"path_losses": 1, "reconnects": 1, "send_waits": 1}
    # Its number belonged to controller 5 then, which is nobody here.
    assert events[address(1)] == nothing | {"failovers": 2}


def lost_and_found(ends_ms: dict[int, int], repeats: int = 1) -> Document:
    """Path 1 serves nothing after 101 ms, where it is lost; events at these times, by kind."""
    node = FabricNode(requests=53, paths=2).run()
    lost = START_NS + 101 * MS
    late = {r["request"] for r in node.tables["nvme"]
            if r["controller"] == 1 and r["setup_ns"] > lost}  # fmt: skip
    for name in ("nvme", "block"):
        node.tables[name] = [r for r in node.tables[name] if r["request"] not in late]
    rest = {"value": 0, "reserved": 0, "unused": 0, "padding": 0, "controller": 1,
            "device": path_device(1)}  # fmt: skip
    events = [(FabricKind.PATH_LOST, 101 + i) for i in range(repeats)]
    events += [(FabricKind(kind), ms) for kind, ms in ends_ms.items()]
    node.tables["fabric"] += [
        rest | {"kind": kind, "time_ns": START_NS + ms * MS} for kind, ms in events
    ]
    return build(node.capture())


def told(made: Document) -> tuple[str, list[str], list[Any]]:
    """State and outages of path 1, and the notes on the paths."""
    (path,) = [d["path"] for d in made["devices"] if d["path"]["controller"] == 1]
    notes = [note for note in made["capture"]["notes"] if note.startswith("path ")]
    return path["state"], notes, [tuple(each.values()) for each in path["outages"]]


def test_a_path_that_is_lost_and_not_back_is_told_first() -> None:
    made = lost_and_found({}, repeats=2)
    # The window begins a millisecond before the run.
    note = "path 10.0.1.7:4420 (nvme0c1n1) was lost at +102 ms, and not back at the end of the"
    assert told(made) == ("lost", [f"{note} window"], [(START_NS + 101 * MS, None)])
    assert made["capture"]["notes"][0].startswith("path ")


def test_a_path_that_comes_back_says_after_how_long() -> None:
    made = lost_and_found({FabricKind.PATH_LIVE: 170})
    state, (note,), outages = told(made)
    assert (state, outages) == ("live", [(START_NS + 101 * MS, START_NS + 170 * MS)])
    assert note.endswith("was lost at +102 ms, back after 69.0 ms")


def test_a_path_that_is_used_is_back_even_if_nobody_says_so() -> None:
    node = FabricNode(requests=53, paths=2).run()
    lost = START_NS + 101 * MS
    again = min(r["setup_ns"] for r in node.tables["nvme"]
                if r["controller"] == 1 and r["setup_ns"] > lost)  # fmt: skip
    node.tables["fabric"].append(
        {"value": 0, "reserved": 0, "unused": 0, "padding": 0, "controller": 1,
         "device": path_device(1), "kind": FabricKind.PATH_LOST, "time_ns": lost}
    )  # fmt: skip
    state, _, outages = told(build(node.capture()))
    assert (state, outages) == ("live", [(lost, again)])


def test_events_that_were_not_recorded_are_unknown() -> None:
    (device,) = correlate(FabricNode(requests=5).run().capture(losses={})).devices
    assert device.path is not None and device.path.events is None


def test_losses_are_carried() -> None:
    tables = FabricNode(requests=13).run().capture(losses={"nvme": Loss(900, 60, 40)})
    (device,) = correlate(tables).devices
    assert device.lost_share == pytest.approx(0.1)
    assert device.load is not None and device.load.commands == 13 * 16
    assert build(tables)["devices"][0]["lost_share"] == pytest.approx(0.1)


def test_the_document_of_paths() -> None:
    made = build(FabricNode(requests=31, paths=2, unit_bytes=256 * KIB).run().capture())
    first, second = made["devices"]
    assert {first["path"]["address"], second["path"]["address"]} == {address(0), address(1)}
    assert first["head"] == second["head"] == "nvme0n1"
    for device in (first, second):
        assert device["transport"] == "nvme tcp"
        assert sum(q["commands"] for q in device["queues"]) == device["load"]["commands"]
        assert device["segments"][0]["parts"] == ["driver"]
        assert device["counted_from"] == "nvme"
