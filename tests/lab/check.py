"""What a case expects against what its capture says; runs on the host, from files alone."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvprobe import document
from kvprobe.capture.part import PartFolder
from kvprobe.capture.reader import Capture, open_capture
from kvprobe.capture.recorder import pack
from kvprobe.model import Frame
from kvprobe.schema import FabricKind
from tests.lab.case import Case
from tests.lab.nvme_stamps import check_stamps

KINDS = {"read": 0, "write": 1, "flush": 2}
"""Kind -> operation of a block row."""
NOT_YET_NOTICED = 8
"""A hidden completion is noticed when the request's memory is used again: not the last ones."""
OPCODES = {"read": 2, "write": 1, "flush": 0}
"""Kind -> opcode of an NVMe I/O command (NVM command set specification)."""


@dataclass(frozen=True)
class Result:
    """What the guest left of one case.

    Attributes:
        capture: the file, opened.
        facts: what workload and kernel counted.
        numbers: dev_t of the disks whose requests are NVMe commands -> name.
    """

    case: Case
    capture: Capture
    facts: dict[str, Any]
    numbers: dict[int, str]

    def rows(self, table: str) -> Frame:
        """Rows of a table, of the case's disks where it has a device.

        While probes are being attached some see what others do not: what began then is left out.
        """
        frame = self.capture.frame(table)
        if "device" not in frame or table == "fabric":
            return frame
        keep = np.isin(frame["device"], list(self.numbers))
        if begin := {"block": "queued_ns", "nvme": "setup_ns"}.get(table):
            keep &= frame[begin] >= self.capture.manifest.start_ns
        return {name: column[keep] for name, column in frame.items()}


def open_result(case: Case, folder: Path) -> Result:
    """Open what the guest left.

    Raises:
        AssertionError: the case failed in the guest; its log is the message.
    """
    error = folder / "error.txt"
    assert not error.exists(), error.read_text()
    assert (folder / "facts.json").exists(), f"the guest left nothing of {case.name}"
    facts = json.loads((folder / "facts.json").read_text())
    packed, part = folder / f"{case.name}.kvcap", folder / f"{case.name}.kvcap.part"
    if part.exists():  # the guest recorded to the end, else there would be no facts
        pack(part, packed, replace(PartFolder(part).manifest, complete=True))
    capture = open_capture(packed)
    names = {*facts["paths"], *facts["controllers"]}
    manifest = capture.manifest
    numbers = {disk.device: disk.name for disk in manifest.devices}
    numbers |= {path.device: path.name for path in manifest.nvme_paths}
    return Result(case, capture, facts, {k: v for k, v in numbers.items() if v in names})


def check(result: Result) -> None:
    """Everything that the case expects.

    Raises:
        AssertionError: what was otherwise.
    """
    assert not result.capture.notes
    expected = result.case.expected
    check_losses(result)
    check_counts(result)
    if result.case.topology.transport != "none":
        check_join(result)
    if expected.device_ms is not None:
        check_device_time(result, expected.device_ms, expected.tolerance)
    if expected.fabric:
        seen = {FabricKind(int(k)).name.lower() for k in result.rows("fabric")["kind"]}
        assert set(expected.fabric) <= seen, f"fabric events: {sorted(seen)}"
    if expected.findings or expected.no_findings:
        check_findings(result)


def check_counts(result: Result) -> None:
    """Requests, commands and bytes are what the case says, and what the kernel counted."""
    expected = result.case.expected
    block = result.rows("block")
    nvme = result.rows("nvme") if result.case.topology.transport != "none" else None
    for kind in KINDS:
        # An empty flush is two requests: the one that asks for it, as a write of nothing, and the
        # one that is sent.
        mine = (block["op"] == KINDS[kind]) & ((block["bytes"] > 0) | (kind == "flush"))
        figures = {"block rows": (int(mine.sum()), int(block["bytes"][mine].sum()))}
        if nvme is not None:
            sent = nvme["opcode"] == OPCODES[kind]
            figures["commands"] = (int(sent.sum()), int(nvme["bytes"][sent].sum()))
        counted = _kernel_count(result, kind)
        if counted is not None:
            figures["the kernel's"] = counted
        said = [work["said"][kind] for work in result.facts["work"] if work["tool"] == "fio"]
        wanted = expected.bytes.get(kind)
        if wanted is not None:
            assert {bytes_ for _, bytes_ in figures.values()} == {wanted}, f"{kind}: {figures}"
            assert not said or sum(job["bytes"] for job in said) == wanted, f"{kind}: fio's {said}"
        for name, number in (("commands", expected.commands), ("block rows", expected.requests)):
            if kind in number:
                figures[f"expected {name}"] = (number[kind], figures[name][1])
        assert len({count for count, _ in figures.values()}) == 1, f"{kind}: {figures}"


def _kernel_count(result: Result, kind: str) -> tuple[int, int] | None:
    """Requests with data, and bytes, that the disks counted.

    None where a disk went away with its counters, or the file system went on writing.
    """
    counted = result.facts["counted"]
    if set(counted) != set(result.facts["paths"]):
        return None
    if any(fault.action in ("disconnect", "connect") for fault in result.case.faults):
        return None
    if kind != "read" and result.case.topology.file_system:
        return None
    empty = sum(disk["flush"] for disk in counted.values()) if kind == "write" else 0
    requests = sum(disk[kind] for disk in counted.values()) - empty
    return requests, sum(disk.get(f"{kind}_bytes", 0) for disk in counted.values())


def check_losses(result: Result) -> None:
    """No row was lost; of the backing store's, as many as the kernel counted more.

    A completion that interrupts the very program that notes completions is hidden from it. The
    store's timer does that under emulation; kvprobe counts such a request as lost.
    """
    lost = {table: count for table, count in result.facts["lost"].items() if count}
    hidden = lost.pop("block", 0)
    assert not lost, f"rows were lost: {lost}"
    if hidden:
        frame = result.capture.frame("block")
        store = result.facts["store"]
        rows = int((frame["device"] == store["device"]).sum())
        assert rows + hidden + NOT_YET_NOTICED >= store["requests"], (
            f"{hidden} block rows were lost: {store}"
        )


def check_join(result: Result) -> None:
    """Each I/O command belongs to the one block row of its request, with the same bytes."""
    block, nvme = result.rows("block"), result.rows("nvme")
    starts: dict[int, list[int]] = {}
    for row, request in enumerate(block["request"].tolist()):
        starts.setdefault(request, []).append(row)
    taken: Counter[int] = Counter()
    for row in range(len(nvme["request"])):
        setup = nvme["setup_ns"][row]
        owners = [
            i
            for i in starts.get(int(nvme["request"][row]), [])
            if block["queued_ns"][i] <= setup <= block["done_ns"][i]
        ]
        assert len(owners) == 1, f"command {row}: {len(owners)} block rows"
        owner = owners[0]
        taken[owner] += 1
        assert nvme["device"][row] == block["device"][owner]
        assert nvme["done_ns"][row] <= block["done_ns"][owner]
        if nvme["retries"][row] == 0 and nvme["status"][row] == 0:
            assert nvme["bytes"][row] == block["bytes"][owner], f"command {row}: bytes"
    check_stamps(nvme)
    empty = (block["op"] == KINDS["write"]) & (block["bytes"] == 0)
    alone = int((~empty).sum()) - len(taken)
    assert not alone, f"{alone} block rows without a command"


def check_device_time(result: Result, injected_ms: float, tolerance: float) -> None:
    """The mean time of a read below the driver is what was injected, as fio measured it.

    The emulated timer is late by as much as the host is busy: fio's own figure has that, too.
    """
    block = result.rows("block")
    reads = block["op"] == 0
    took = (block["done_ns"][reads] - block["issued_ns"][reads]).mean() / 1e6
    seen = result.facts["work"][0]["said"]["read"]["mean_ns"] / 1e6
    assert took >= injected_ms, f"{took:.2f} ms, {injected_ms:g} ms were injected"
    assert abs(took - seen) <= tolerance * seen, f"{took:.2f} ms, fio says {seen:.2f} ms"


def check_findings(result: Result) -> None:
    """The report has the findings that it must have, and none that it must not."""
    expected = result.case.expected
    report = document.build(result.capture)
    found = {finding["slug"]: finding for finding in report["findings"]}
    for slug in expected.findings:
        assert slug in found, f"no {slug} among {sorted(found)}"
    wrong = sorted(set(expected.no_findings) & set(found))
    assert not wrong, f"found, but should not be: {[found[slug] for slug in wrong]}"
    for slug, text in expected.subjects.items():
        assert text in json.dumps(found[slug]), found[slug]
