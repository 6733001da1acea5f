"""The findings of the NVMe path on simulated fabrics: who is named, and with which figures."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvprobe import findings
from kvprobe.capture.frames import empty_frame
from kvprobe.correlator import Ledger, correlate
from kvprobe.findings import fabric_congestion, slow_path
from kvprobe.model import DeviceFacts, Finding, Loss, Missing
from kvprobe.schema import TABLES, FabricKind
from tests.correlator.fabric_node import HEAD, KIB, MS, START_NS, US, FabricNode
from tests.findings import fabrics
from tests.findings.ledgers import N

STORAGE = {case.__name__ for case in fabrics.ILL}


def only(ledger: Ledger) -> Finding:
    (found,) = findings.detect_all(ledger)
    return found


def figures(finding: Finding) -> dict[str, float]:
    return {e.metric: e.value for e in finding.evidence if e.value is not None}


def slugs(ledger: Ledger) -> set[str]:
    return {finding.slug for finding in findings.detect_all(ledger)} & STORAGE


# ---------------------------------------------------------------- queue_starved


def test_starved_says_how_little_was_in_flight_and_for_how_many() -> None:
    found = only(fabrics.queue_starved())
    said = figures(found)
    assert found.subject == "nvme0n1"
    # One at a time: 4 requests wait, the gate opens for one read, 380 of each 500 us.
    assert 0.5 < said["commands in flight while restores waited, mean"] <= 1
    assert 1.5 < said["requests waiting for restores at once, mean"] <= 4
    assert said["I/O queues of each controller"] == 4


def test_serial_reads_of_requests_side_by_side_are_serial_only() -> None:
    found = only(fabrics.made(N, in_flight=1, concurrency=2, prefill_ns=MS))
    assert found.slug == "serial_restore"


def test_one_io_queue_is_named() -> None:
    found = only(fabrics.one_io_queue())
    assert (found.slug, found.subject) == ("queue_starved", "nvme0n1: one I/O queue")
    assert figures(found)["processors of the host"] == 8


def test_one_io_queue_of_a_machine_with_one_processor_is_enough() -> None:
    alone = replace(fabrics.one_io_queue(), cpus=1)
    assert slugs(alone) == set()


def test_serial_reads_of_one_request_are_not_starved_queues() -> None:
    found = only(fabrics.made(N, in_flight=1, concurrency=1))
    assert found.slug == "serial_restore"


@pytest.mark.parametrize("fault", ["one_at_a_time", "one_reader"])
def test_serial_reads_of_requests_that_do_not_even_overlap_are_both(fault: str) -> None:
    both = fabrics.made(N, in_flight=1, concurrency=6, prefill_ns=MS, **{fault: True})
    assert {"serial_restore", "queue_starved"} <= {f.slug for f in findings.detect_all(both)}
    assert slugs(both) == {"queue_starved"}


# ---------------------------------------------------------------- queue_saturated


def test_saturated_names_the_size_and_the_peak() -> None:
    found = only(fabrics.queue_saturated())
    said = figures(found)
    assert said["commands that a queue holds"] == 15
    assert said["highest depth of the worst one"] == 15
    assert said["queues that were full"] == 2
    assert said["share of the reads' time before their commands were set up"] > 0.2


def test_one_queue_that_is_full_is_saturated_and_not_starved() -> None:
    found = only(fabrics.made(N, **fabrics.FAULTS["queue_saturated"] | {"io_queues": 1}))
    assert found.slug == "queue_saturated"
    assert figures(found)["I/O queues of each controller"] == 1
    assert figures(found)["processors of the host"] == 8


def test_a_cap_on_the_path_counts_as_its_queue_size() -> None:
    """127 commands fit, nr_requests lets 15 in."""
    tables = FabricNode(requests=N, **fabrics.FAULTS["queue_saturated"]).run().capture()
    paths = tuple(replace(p, queue_size=127) for p in tables.manifest.nvme_paths)
    capped = DeviceFacts(
        paths[0].device, paths[0].name, "nvme tcp", scheduler="none", nr_requests=15
    )
    tables.manifest = replace(
        tables.manifest, nvme_paths=paths, devices=(*tables.manifest.devices, capped)
    )
    assert slugs(correlate(tables)) == {"queue_saturated"}
    tables.manifest = replace(tables.manifest, devices=tables.manifest.devices[:1])
    assert slugs(correlate(tables)) == set()


# ---------------------------------------------------------------- queue_imbalance


def test_imbalance_names_the_path_and_the_policy() -> None:
    found = only(fabrics.queue_imbalance())
    assert found.subject == "nvme0n1: 10.0.0.7:4420 (nvme0c0n1)"
    said = figures(found)
    assert said["share of the bytes on the busiest"] == 1.0
    assert said["usable paths, under the iopolicy numa"] == 2


def test_one_queue_of_four_that_carries_all_is_named() -> None:
    found = only(fabrics.made(N, pinned=True, in_flight=8))
    assert found.subject == "nvme0n1: 10.0.0.7:4420 (nvme0c0n1): nvme0 queue 1"
    assert figures(found)["queues that its processors could use"] == 4


@pytest.mark.parametrize("change", [{"ana_state": "non-optimized"}, {"state": "connecting"}])
def test_a_path_that_must_not_be_used_idles_on_purpose(change: dict[str, Any]) -> None:
    tables = FabricNode(requests=N, paths=2, policy="numa", in_flight=8).run().capture()
    first, second = tables.manifest.nvme_paths
    tables.manifest = replace(tables.manifest, nvme_paths=(first, replace(second, **change)))
    assert slugs(correlate(tables)) == set()


# ---------------------------------------------------------------- fabric_congestion


def test_congestion_counts_its_events() -> None:
    found = only(fabrics.fabric_congestion())
    said = figures(found)
    assert found.subject == "10.0.0.7:4420 (nvme0c0n1)"
    assert said["segments sent again"] == 12
    assert said["congestion events: CWR, recovery, loss"] == 12  # the way back to open is none
    assert said["latency at such an event, median"] > 5 * MS
    assert said["latency otherwise, p99"] < 2 * MS
    assert said["share of the slow commands that met an event"] > 0.9


def test_events_apart_from_the_tail_are_no_congestion() -> None:
    """The same stalls, and as many retransmissions just after each of them."""
    ledger = fabrics.fabric_congestion()
    late = dict(ledger.fabric)
    late["time_ns"] = late["time_ns"] + 3 * MS
    assert slugs(replace(ledger, fabric=late)) == set()


def test_segments_lost_on_the_way_here_show_as_gaps() -> None:
    """Reads: the target sends again, and this host sees that something is missing."""
    ledger = fabrics.fabric_congestion()
    gaps = dict(ledger.fabric)
    again = gaps["kind"] == FabricKind.RETRANSMIT
    gaps["kind"] = np.where(again, FabricKind.RECEIVE_GAP, FabricKind.SEND_SPACE)
    said = figures(only(replace(ledger, fabric=gaps)))
    assert said["gaps in what arrived from the target"] == 12
    assert said["segments sent again"] == 0


def test_retransmissions_that_nobody_notices_are_no_congestion() -> None:
    ledger, quiet = fabrics.fabric_congestion(), fabrics.one_path()
    assert slugs(replace(quiet, fabric=ledger.fabric)) == set()


@pytest.mark.parametrize(
    ("met", "n", "expected", "chance", "explained"),
    [
        (0.9, 97, 0.2, 0.01, True),
        (5 / 12, 12, 0.01, 0.01, False),  # five segments in a row on a busy host
        (10 / 12, 12, 0.01, 0.01, True),
        (0.11, 97, 0.06, 0.01, False),  # hardly more than by chance
        (0.09, 997, 0.01, 0.01, False),  # most of the tail has another cause
        (0.9, 97, 0.8, 0.01, False),  # events are so many that anything slow meets one
        (0.5, 97, 0.2, 0.12, False),  # so few that shifted ones do as well now and then
    ],
)
def test_what_explains_a_tail(
    met: float, n: int, expected: float, chance: float, explained: bool
) -> None:
    assert fabric_congestion._Tail(met, expected, chance, n).is_explained is explained


def test_events_everywhere_explain_no_tail() -> None:
    """Slow commands for another reason, and a retransmission in each half of a millisecond."""
    ledger = fabrics.fabric_congestion()
    low, high = ledger.window_ns
    times = np.arange(low, high, MS // 2)
    noise = {name: np.full(len(times), -1) for name in ledger.fabric}
    noise |= {"time_ns": times, "controller": np.zeros(len(times), int)}
    noise |= {"kind": np.full(len(times), FabricKind.RETRANSMIT)}
    tail = fabric_congestion._tail(
        ledger.commands, fabric_congestion._groups(ledger.commands, noise), ledger.window_ns
    )
    assert tail is not None and not tail.is_explained
    assert tail.met == pytest.approx(tail.expected, abs=0.02)


def test_others_connections_do_not_count() -> None:
    ledger = fabrics.fabric_congestion()
    for column, value in (("controller", 5), ("queue", 0)):
        other = dict(ledger.fabric)
        other[column] = np.full(len(other[column]), value)
        assert slugs(replace(ledger, fabric=other)) == set()


def test_figures_are_of_the_path_that_is_named() -> None:
    """Two strays on the other path, which is not the one that is ill."""
    ledger = fabrics.made(N, **fabrics.FAULTS["fabric_congestion"] | {"paths": 2})
    strays = {name: column[:3].copy() for name, column in ledger.fabric.items()}
    strays["controller"][:] = 1
    fabric = {n: np.concatenate([ledger.fabric[n], strays[n]]) for n in strays}
    (found,) = [f for f in findings.detect_all(replace(ledger, fabric=fabric))
                if f.slug == "fabric_congestion"]  # fmt: skip
    said = figures(found)
    assert found.subject == "10.0.0.7:4420 (nvme0c0n1)"
    assert said["segments sent again"] == said["congestion events: CWR, recovery, loss"] == 12
    own = int((ledger.commands["controller"] == 0).sum())
    counted = {e.metric: e.n for e in found.evidence}
    assert counted["segments sent again"] == 24
    assert counted["losses for each command"] == own < len(ledger.commands["op"])


def without_states(ledger: Ledger) -> Ledger:
    """Segments were sent again while congestion control saw no loss."""
    kept = ledger.fabric["kind"] == FabricKind.RETRANSMIT
    return replace(ledger, fabric={n: column[kept] for n, column in ledger.fabric.items()})


def test_probes_that_made_good_no_loss_are_no_congestion() -> None:
    assert slugs(without_states(fabrics.fabric_congestion())) == set()


def test_without_states_in_the_kernel_segments_sent_again_must_do() -> None:
    blind = Missing("function tcp_cong_state_set", "this kernel has no such function", "states")
    found = only(replace(without_states(fabrics.fabric_congestion()), missing=(blind,)))
    assert found.slug == "fabric_congestion"


def test_many_losses_are_told_even_if_no_slow_command_met_them() -> None:
    quiet = fabrics.one_path()
    times = np.linspace(*quiet.window_ns, 29).astype(np.int64)
    losses = {name: np.full(29, -1) for name in fabrics.fabric_congestion().fabric}
    losses |= {"time_ns": times, "controller": np.zeros(29, int)}
    losses |= {"kind": np.full(29, FabricKind.RECEIVE_GAP), "queue": np.ones(29, int)}
    found = only(replace(quiet, fabric=losses))
    assert (found.slug, found.severity) == ("fabric_congestion", "info")
    assert found.confidence < 0.5
    few = {name: column[::2] for name, column in losses.items()}
    assert slugs(replace(quiet, fabric=few)) == set()


def test_a_loss_with_every_command_leaves_nothing_to_compare_with() -> None:
    steady = tuple((START_NS + 2 * MS * k, 1_900 * US) for k in range(1, 200))
    found = only(fabrics.made(N, stalls=steady))
    assert found.slug == "fabric_congestion"
    said = figures(found)
    assert said["losses for each command"] > fabric_congestion.HEAVY


# ---------------------------------------------------------------- slow_path


def test_the_slow_path_is_named_with_what_was_injected() -> None:
    found = only(fabrics.slow_path())
    said = figures(found)
    assert found.subject == "10.0.1.7:4420 (nvme0c1n1)"
    # The wire varies between 0.8 and 1.25 of its time, evenly: 1.025 in the middle.
    difference = said["its median latency"] - said["median latency of its peers"]
    assert difference == pytest.approx(fabrics.EXTRA_NS * 1.025, rel=0.05)
    assert said["median time more than its peers in: wire and target"] == pytest.approx(
        fabrics.EXTRA_NS * 1.025, rel=0.05
    )
    ratio = said["latency over that of its peers at the same size"]
    assert ratio == pytest.approx(said["its median latency"] / said["median latency of its peers"])
    low, high = (said[f"{end} end of that ratio at 90 %"] for end in ("low", "high"))
    assert slow_path.MIN_LOW < low < ratio < high


def test_a_path_that_gets_the_large_reads_is_not_slow() -> None:
    """Sizes are compared with themselves: 1 MiB takes longer than 64 KiB on any path."""
    ledger = fabrics.two_paths()
    rows = dict(ledger.commands)
    first = rows["device"] == ledger.kv_devices[0].facts.device
    few = np.arange(len(first)) % 10 < 3
    large = first ^ few  # seven of ten on the first path, three of ten on the second
    rows["bytes"] = np.where(large, 1 << 20, 1 << 16)
    rows["done_ns"] = rows["done_ns"] + np.where(large, 5 * MS, 0)
    assert slugs(replace(ledger, commands=rows)) == set()


def test_a_slow_path_without_stamps_is_found_but_not_where() -> None:
    ledger = fabrics.made(N, paths=2, extra_ns=(0, fabrics.EXTRA_NS), stamps=False)
    found = only(ledger)
    assert found.slug == "slow_path"
    assert not [metric for metric in figures(found) if "wire" in metric and "driver" not in metric]


# ---------------------------------------------------------------- split_requests


def test_split_states_ratio_size_and_the_limit() -> None:
    said = figures(only(fabrics.split_requests()))
    assert said["commands a read, mean"] == 16
    assert said["size of most pieces"] == 32 * KIB
    assert said["the limit that does it: max_sectors_kb of nvme0n1"] == 32 * KIB
    assert said["commands a restore, mean"] == 16 * 16


@pytest.mark.parametrize(
    ("knob", "value", "metric"),
    [
        ("max_hw_sectors_kb", "32", "the limit that does it: max_hw_sectors_kb of nvme0c0n1"),
        ("chunk_sectors", "64", "the limit that does it: chunk_sectors of nvme0c0n1"),
        ("max_hw_sectors_kb", "128", "no limit is that small; cuts are at multiples of"),
        ("max_hw_sectors_kb", "none", "no limit is that small; cuts are at multiples of"),
    ],
)
def test_the_limit_is_looked_for_among_the_knobs(knob: str, value: str, metric: str) -> None:
    tables = FabricNode(requests=N, unit_bytes=512 * KIB, max_bytes=32 * KIB).run().capture()
    roomy = DeviceFacts(HEAD, "nvme0n1", "nvme tcp", max_request_bytes=1280 * KIB)
    tables.manifest = replace(tables.manifest, devices=(roomy,))
    ledger = correlate(tables)
    knobs = {name: np.array([text], object) for name, text in (
        ("name", knob), ("subject", "nvme0c0n1"), ("value", value))}  # fmt: skip
    assert figures(only(replace(ledger, knobs=knobs)))[metric] == 32 * KIB


@pytest.mark.parametrize(
    ("unit", "limit"), [(512 * KIB, 128 * KIB), (96 * KIB, 32 * KIB), (512 * KIB, 1280 * KIB)]
)
def test_large_or_few_pieces_are_none(unit: int, limit: int) -> None:
    assert slugs(fabrics.made(N, unit_bytes=unit, max_bytes=limit)) == set()


# ---------------------------------------------------------------- cpu_bound_transport


def test_the_processor_is_named_with_its_shares() -> None:
    found = only(fabrics.cpu_bound_transport())
    said = figures(found)
    assert found.subject == "cpu0 of nvme0n1"
    assert said["cpu0 in softirq while restores waited"] == pytest.approx(0.62, rel=0.01)
    assert said["cpu0 busy while restores waited"] == pytest.approx(0.97, rel=0.01)
    # 1 MiB at 0.06 ns a byte, twelve times as long, of that and 300 us of wire.
    expected = 754.97 / (754.97 + 5 + 300 * 1.025 + 6.5 + 4)
    share = said["share of commands' time from first sign to completion"]
    assert share == pytest.approx(expected, rel=0.02)


def test_without_processors_the_receive_share_decides_and_is_less_sure() -> None:
    ledger = fabrics.cpu_bound_transport()
    blind = replace(ledger, host=empty_frame(TABLES["host"]))
    found = only(blind)
    assert found.subject == "nvme0n1"
    assert found.confidence < 0.5
    mild = replace(fabrics.made(N, receive_factor=6.0), host=blind.host)
    assert slugs(mild) == set()


def test_a_busy_processor_and_quick_receiving_are_no_finding() -> None:
    ledger = fabrics.cpu_bound_transport()
    assert slugs(replace(fabrics.one_path(), host=ledger.host)) == set()


# ---------------------------------------------------------------- what is not known


@pytest.mark.parametrize("case", fabrics.ILL)
def test_no_depth_is_trusted_that_was_counted_from_part_of_the_rows(case: fabrics.Case) -> None:
    ledger = case()
    lossy = tuple(replace(d, lost_share=0.1) for d in ledger.devices)
    left = slugs(replace(ledger, devices=lossy))
    assert left <= {"slow_path", "split_requests", "fabric_congestion", "cpu_bound_transport"}


@pytest.mark.parametrize("case", fabrics.ILL)
def test_nothing_is_said_of_commands_whose_start_is_not_known(case: fabrics.Case) -> None:
    ledger = case()
    rows = dict(ledger.commands)
    rows["start_ns"] = np.full(len(rows["start_ns"]), -1)
    devices = tuple(
        replace(d, queues=(), segments=(), load=None, mean_depth=None) for d in ledger.devices
    )
    blank = replace(ledger, commands=rows, devices=devices)
    # Pieces are counted from block rows, which know when they were done.
    assert slugs(blank) <= {"split_requests"}


@pytest.mark.parametrize("case", fabrics.ILL)
def test_block_rows_alone_still_show_what_they_can(case: fabrics.Case) -> None:
    """Without the probe nvme: paths by their disks, queues by their hardware numbers."""
    name = case.__name__
    node = FabricNode(requests=N, **fabrics.FAULTS[name]).run()
    node.tables["nvme"].clear()
    found = slugs(correlate(node.capture(losses={"block": Loss(1), "ops": Loss(1)})))
    # What needs connections or stamps is unknown then.
    gone = {"fabric_congestion"} if name != "cpu_bound_transport" else set()
    assert found <= {name}
    assert (found == {name}) == (name not in gone)
