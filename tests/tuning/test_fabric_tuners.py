"""What is proposed about findings of the NVMe path, from the findings as detectors make them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvprobe import findings
from kvprobe.correlator import Ledger, correlate
from kvprobe.document import facts_of, propose
from kvprobe.model import Facts, Finding, Proposal
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
    assert proposal.effect is not None and proposal.effect.mid <= 0.05


def test_full_queues_get_more_room_where_nothing_was_measured() -> None:
    known = replace(facts(fabrics.queue_saturated()), surface=())
    (proposal,) = proposals(fabrics.queue_saturated(), "queue_saturated", known)
    assert (proposal.knob, proposal.current, proposal.proposed) == ("queue_size", 16, 32)
    assert "--queue-size=32" in proposal.apply and "--queue-size=16" in proposal.undo


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
