"""The report document of a simulated capture: its keys, its types and its sums."""

import json
from typing import Any

import pytest

from kvprobe import document
from kvprobe.capture.manifest import Clock, Manifest
from kvprobe.capture.tables import FixedTables
from kvprobe.correlator import correlate
from kvprobe.document import Document
from kvprobe.model import Effect, Evidence, Finding, Proposal
from tests.correlator.simulate import Node

# The contract, key by key; additions are allowed, these must stay.
TOP = "schema_version capture losses cost requests break_even devices findings proposals"
CAPTURE = "id start_wall duration_ns complete host kernel devices engine"
COST = "probe_ns_per_event probe_cpu_share agent_cpu_share budget_share"
REQUEST = (
    "id t_arrival_ns ttft_ns tokens spans restore recompute verdict gain_ns gain_low_ns "
    "gain_high_ns attribution"
)
TOKENS = "prompt device_hit storage_hit computed"
SPANS = (
    "engine_queue_ns lookup_ns lookup_to_read_ns restore_ns read_to_prefill_ns prefill_ns other_ns"
)
RESTORE = (
    "bytes ops commands exposed_ns hidden_ns device_ns block_queue_ns software_ns idle_ns "
    "effective_depth"
)
RECOMPUTE = "estimate_ns low_ns high_ns"
ATTRIBUTION = "exact thread window shared none"
BREAK_EVEN = "model curve tokens tokens_low tokens_high"
POINT = "tokens restore_ns restore_low_ns restore_high_ns recompute_ns"
DEVICE = "name transport queues depth surface little_check"
DEPTH = "mean p99 time_at_zero_share"
FINDING = "slug severity confidence subject evidence would_disprove"
EVIDENCE = "metric value unit n"
PROPOSAL = "slug knob target current proposed unit reason effect risk live apply undo needs"
EFFECT = "metric low mid high"

FINDINGS = [Finding("slug", "info", 0.5, "all", (Evidence("m", float("nan"), "s", 3),), "why not")]
PROPOSALS = [Proposal("p", "slug", "k", "t", 1, 2, "B", "r", Effect("m", -0.5, -0.3, -0.1))]


def has(part: Document, words: str, exactly: bool = False) -> None:
    keys = set(words.split())
    assert keys == set(part) if exactly else keys <= set(part)


@pytest.fixture(scope="module")
def simulated() -> tuple[FixedTables, Document]:
    tables = Node(3, 4, requests=131, compute_below=6, read_ns=200_000).run().capture()
    made = document.assemble(correlate(tables), tables.manifest, FINDINGS, PROPOSALS)
    return tables, made


def test_keys_are_those_of_the_contract(simulated: tuple[FixedTables, Document]) -> None:
    made = simulated[1]
    has(made, TOP)
    has(made["capture"], CAPTURE)
    has(made["cost"], COST)
    has(made["break_even"], BREAK_EVEN)
    for request in made["requests"]:
        has(request, REQUEST)
        has(request["tokens"], TOKENS)
        has(request["spans"], SPANS, exactly=True)
        has(request["attribution"], ATTRIBUTION, exactly=True)
        if request["restore"] is not None:
            has(request["restore"], RESTORE)
        if request["recompute"] is not None:
            has(request["recompute"], RECOMPUTE)
    for point in made["break_even"]["curve"]:
        has(point, POINT)
    for device in made["devices"]:
        has(device, DEVICE)
        has(device["depth"], DEPTH)
    has(made["findings"][0], FINDING)
    has(made["findings"][0]["evidence"][0], EVIDENCE)
    has(made["proposals"][0], PROPOSAL)
    has(made["proposals"][0]["effect"], EFFECT)


def plain(value: Any) -> bool:
    """Nothing but what JSON has; a bool or a numpy number would pass for an int."""
    if isinstance(value, dict):
        return all(type(k) is str and plain(v) for k, v in value.items())
    if isinstance(value, list):
        return all(plain(v) for v in value)
    return value is None or type(value) in (bool, int, float, str)


def test_it_is_plain_json_without_nan(simulated: tuple[FixedTables, Document]) -> None:
    made = simulated[1]
    assert plain(made)
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert made["findings"][0]["evidence"][0]["value"] is None


def test_sums_hold_in_the_document(simulated: tuple[FixedTables, Document]) -> None:
    tables, made = simulated
    assert len(made["requests"]) == 131
    kinds = set()
    for request in made["requests"]:
        spans, restore = request["spans"], request["restore"]
        assert sum(spans.values()) == request["ttft_ns"]
        kinds.add((restore is None, request["verdict"]))
        if restore is None:
            assert request["recompute"] is None or request["restore_estimate"] is not None
            assert sum(request["attribution"].values()) == 0
            continue
        assert sum(request["attribution"].values()) == pytest.approx(1)
        parts = ("device_ns", "block_queue_ns", "software_ns", "idle_ns")
        assert sum(restore[part] for part in parts) == restore["exposed_ns"]
        assert restore["exposed_ns"] == spans["restore_ns"]
        if request["verdict"] != "unknown":
            gain = request["recompute"]["estimate_ns"] - restore["exposed_ns"]
            assert request["gain_ns"] == pytest.approx(gain)
            assert request["gain_low_ns"] <= request["gain_ns"] <= request["gain_high_ns"]
    assert {True, False} == {computed for computed, _ in kinds}
    read = int(tables.frame("ops")["result"].sum())
    assert sum(made["attributed_bytes"].values()) == read
    assert sum(r["restore"]["bytes"] for r in made["requests"] if r["restore"]) == read


def test_unknown_is_null() -> None:
    tables = Node(3, 1, requests=3).run()
    row = tables.tables["requests"][1]
    for name in ("arrival_ns", "first_token_ns", "prompt_tokens"):
        row[name] = None
    capture = tables.capture()
    made = document.assemble(correlate(capture), capture.manifest, [], [])
    request = made["requests"][1]
    assert request["t_arrival_ns"] is request["ttft_ns"] is request["spans"] is None
    assert request["tokens"]["prompt"] is request["gain_ns"] is None
    assert request["verdict"] == "unknown"
    assert made["break_even"]["tokens"] is None
    assert made["break_even"]["note"]


def test_a_whole_report_of_a_simulated_capture() -> None:
    made = document.build(Node(3, 4, requests=131).run().capture())
    assert plain(made)
    json.dumps(made, allow_nan=False)
    assert made["findings"]
    for finding in made["findings"]:
        has(finding, FINDING)
    for proposal in made["proposals"]:
        has(proposal, PROPOSAL)


def test_a_report_of_nothing() -> None:
    made = document.build(FixedTables(Manifest("test", "empty", 0, 10, Clock(0)), {}))
    assert plain(made)
    json.dumps(made, allow_nan=False)
    assert made["requests"] == made["devices"] == made["proposals"] == []
