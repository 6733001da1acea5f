"""What is proposed about findings of the NVMe path, from the findings as detectors make them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvprobe import findings
from kvprobe.correlator import Ledger, correlate
from kvprobe.document import facts_of, propose
from kvprobe.model import EngineFacts, Facts, Finding, Proposal, ServiceCell
from tests.correlator.fabric_node import HEAD, KIB, FabricNode
from tests.findings import fabrics
from tests.findings.ledgers import N
from tests.tuning.restores import UNIT, US, exact, made


def facts(ledger: Ledger) -> Facts:
    manifest = FabricNode(requests=0).run().manifest()
    return facts_of(ledger, manifest)


def found(ledger: Ledger, slug: str) -> Finding:
    (finding,) = [f for f in findings.detect_all(ledger) if f.slug == slug]
    return finding


def proposals(ledger: Ledger, slug: str, about: Facts | None = None) -> list[Proposal]:
    return propose([found(ledger, slug)], about or facts(ledger))


def test_the_facts_are_of_the_mounted_disk_and_its_paths() -> None:
    known = facts(fabrics.two_paths())
    assert known.device is not None and known.device.device == HEAD
    assert known.device.name == "nvme0n1"  # read-ahead and the like are set there
    assert [path.controller for path in known.paths] == [0, 1]


@pytest.mark.parametrize(
    "ledger", [fabrics.queue_starved(), fabrics.made(N, in_flight=2, concurrency=1)]
)
def test_more_reads_than_were_seen_must_be_measured(ledger: Ledger) -> None:
    (proposal,) = proposals(ledger, "queue_starved")
    assert proposal.knob == "bytes_in_flight" and proposal.needs
    assert proposal.needs.startswith("kvprobe sweep /kv --direct ")


def test_one_io_queue_is_answered_by_one_for_each_processor() -> None:
    (proposal,) = proposals(fabrics.one_io_queue(), "queue_starved")
    assert (proposal.knob, proposal.target) == ("io_queues", "nvme0")
    assert (proposal.current, proposal.proposed) == (1, 8)
    assert "--nr-io-queues=8" in proposal.apply and "--nr-io-queues=1" in proposal.undo
    assert proposal.effect is None and not proposal.live
    local = replace(facts(fabrics.one_io_queue()), paths=())
    assert proposals(fabrics.one_io_queue(), "queue_starved", local) == []


def test_full_queues_get_fewer_reads_where_that_was_measured_to_cost_nothing() -> None:
    """The device is full from four reads on, and sixteen are in flight."""
    flat = [exact(UNIT, d, max(1, d / 4) * 100 * US) for d in (1, 2, 4, 8, 16)]
    known = made(flat, read_ns=400 * US, depth=16.0, reads_in_flight=16)
    (proposal,) = proposals(fabrics.queue_saturated(), "queue_saturated", known)
    assert (proposal.knob, proposal.current, proposal.proposed) == (
        "bytes_in_flight", 16 * UNIT, 4 * UNIT
    )  # fmt: skip
    # A restore is as long as before; a read that need not wait for fifteen others is shorter.
    assert proposal.effect is not None
    assert (proposal.effect.metric, proposal.effect.mid) == ("time_of_a_read_ns", -0.75)


@pytest.mark.parametrize(("low", "proposed"), [(2.34, False), (3.49, True)])
def test_fewer_reads_need_an_interval_that_says_that_the_rate_stays(
    low: float, proposed: bool
) -> None:
    """The middle of a cell may look as good as that of the present depth by chance."""
    rates = [(1, 0.1, 0.1, 0.2), (16, 3.5, low, 4.5), (24, 3.66, 3.22, 3.99)]
    cells = [ServiceCell(UNIT, d, True, r, lo, hi, 19, "capture") for d, r, lo, hi in rates]
    known = made(cells, depth=24.0, reads_in_flight=24)
    answers = proposals(fabrics.queue_saturated(), "queue_saturated", known)
    assert [p.knob for p in answers] == ["bytes_in_flight"] * proposed


def crowded(entries: dict[int, int], **path: Any) -> list[Proposal]:
    """Full queues, and connections that were made with so many entries."""
    knobs = {
        "name": np.array(["io_queues", *["queue_size"] * len(entries)], object),
        "subject": np.array(["nvme0", *(f"nvme{c}" for c in entries)], object),
        "value": np.array(["4", *map(str, entries.values())], object),
    }
    known = facts(replace(fabrics.queue_saturated(), knobs=knobs))
    known = replace(known, surface=(), paths=tuple(replace(p, **path) for p in known.paths))
    return proposals(fabrics.queue_saturated(), "queue_saturated", known)


@pytest.mark.parametrize("entries", [16, 17])
def test_full_queues_get_more_room_where_nothing_was_measured(entries: int) -> None:
    """15 commands fit into 16 entries, or into 17: that depends on the kernel."""
    (proposal,) = crowded({0: entries, 5: 128})
    assert (proposal.knob, proposal.current) == ("queue_size", entries)
    assert proposal.proposed == 2 * entries
    assert f"--queue-size={2 * entries}" in proposal.apply
    assert proposal.undo == f"the same with --queue-size={entries}"


def test_a_queue_size_that_is_not_known_must_be_noted_first() -> None:
    (proposal,) = crowded({})
    assert (proposal.current, proposal.proposed) == (None, 32)
    assert proposal.undo.startswith("note sqsize of /sys/class/nvme/")


def test_a_larger_queue_is_no_help_where_the_disk_admits_less() -> None:
    assert crowded({0: 128}, queue_size=127) == []


def test_one_full_queue_may_be_joined_by_others() -> None:
    ledger = fabrics.made(N, **fabrics.FAULTS["queue_saturated"] | {"io_queues": 1})
    answers = proposals(ledger, "queue_saturated", replace(facts(ledger), surface=()))
    assert [p.knob for p in answers] == ["queue_size", "io_queues"]


@pytest.mark.parametrize(
    ("adapter", "name", "words"),
    [
        (None, "kvprobe-workload", "--reads-in-flight"),
        ("jsonl", "kvprobe-workload", "--reads-in-flight"),
        (None, "somebody's engine", None),
    ],
)
def test_knobs_are_said_in_the_words_of_the_engine_that_named_itself(
    adapter: str | None, name: str, words: str | None
) -> None:
    ledger = fabrics.one_path()
    engine = replace(ledger.engine or EngineFacts(name), name=name)
    manifest = FabricNode(requests=0).run().manifest(engine_name=adapter, engine=engine)
    settings = facts_of(replace(ledger, engine=engine), manifest).settings
    said = settings["bytes_in_flight"](8 * (engine.unit_bytes or 1)) if settings else None
    assert (said.name if said else None) == words


def test_an_idle_path_is_answered_by_a_policy() -> None:
    (proposal,) = proposals(fabrics.queue_imbalance(), "queue_imbalance")
    assert (proposal.knob, proposal.target) == ("iopolicy", "nvme0n1")
    assert (proposal.current, proposal.proposed, proposal.live) == ("numa", "round-robin", True)
    file = "/sys/class/nvme-subsystem/nvme-subsys0/iopolicy"
    assert proposal.apply == f"echo round-robin > {file}"
    assert proposal.undo == f"echo numa > {file}"


def test_queues_of_one_path_have_no_policy() -> None:
    assert proposals(fabrics.made(N, pinned=True, in_flight=8), "queue_imbalance") == []


def test_the_limit_that_cuts_is_raised_to_the_usual_one() -> None:
    (proposal,) = proposals(fabrics.split_requests(), "split_requests")
    assert (proposal.knob, proposal.target) == ("max_sectors_kb", "nvme0n1")
    assert (proposal.current, proposal.proposed) == (32 * KIB, 512 * KIB)  # a whole read
    assert proposal.effect is not None
    assert proposal.effect.mid == pytest.approx(1 / 16 - 1)
    assert proposal.apply == "echo 512 > /sys/block/nvme0n1/queue/max_sectors_kb"
    assert proposal.undo == "echo 32 > /sys/block/nvme0n1/queue/max_sectors_kb"


def test_a_limit_of_the_hardware_gets_no_proposal() -> None:
    tables = FabricNode(requests=N, unit_bytes=512 * KIB, max_bytes=32 * KIB).run().capture()
    (head,) = tables.manifest.devices
    roomy = replace(head, max_request_bytes=1280 * KIB)
    tables.manifest = replace(tables.manifest, devices=(roomy,))
    assert proposals(correlate(tables), "split_requests") == []
