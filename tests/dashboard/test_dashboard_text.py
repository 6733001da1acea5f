"""Panels, cells and pages as text: what they say, and that they never raise."""

import copy
import random
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from kvprobe import units
from kvprobe.dashboard import details, device, panels
from kvprobe.dashboard.feed import Position, Snapshot
from kvprobe.dashboard.table import (
    COLUMNS,
    ORDERS,
    Moment,
    cells,
    columns_for,
    ordered,
    part_bar,
    ttft_or_age,
    verdict,
)
from kvprobe.digest import rows
from tests.reports.make_sample_report import document
from tests.reports.test_report_text import leaves

Document = dict[str, Any]


def plain(renderable: RenderableType, width: int = 70) -> str:
    """A page as text."""
    console = Console(file=StringIO(), width=width, _environ={})
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_cells_are_exactly_as_wide_as_their_columns(sample: Document) -> None:
    for row in sample["requests"]:
        for column, cell in zip(COLUMNS, cells(row, COLUMNS, Moment(1)), strict=True):
            assert cell.cell_len <= column.width
            assert not column.right or cell.cell_len == column.width


@pytest.mark.parametrize("width", range(80, 201))
def test_columns_fit(width: int) -> None:
    assert sum(column.width + 1 for column in columns_for(width)) <= width - 1


@pytest.mark.parametrize(("key", "_words"), ORDERS)
def test_every_order_can_be_used_and_reversed(sample: Document, key: str, _words: str) -> None:
    found = ordered(sample["requests"], key, Moment(1))
    assert len(found) == 61
    order = next(column.order for column in COLUMNS if column.key == key)
    assert order is not None
    known = [value for row in found if (value := order(row, Moment(1))) is not None]
    assert known == sorted(known, reverse=True)
    back = ordered(sample["requests"], key, Moment(1), reverse=True)
    assert [order(row, Moment(1)) for row in back[: len(known)]] == known[::-1]


def test_a_request_without_a_first_token_shows_its_age() -> None:
    row = {"id": "a", "t_arrival_ns": 1_000, "ttft_ns": None}
    assert ttft_or_age(row, Moment(2_500_001_000)) == 2_500_000_000
    assert ttft_or_age(row, Moment(None)) is None
    ages = [c for c in COLUMNS if c.key == "ttft"]
    assert [cell.plain.strip() for cell in cells(row, ages, Moment(2_500_001_000))] == ["2.50 s…"]


def test_losses_come_before_good_news(sample: Document) -> None:
    line = panels.answer_line(sample, 40).plain
    assert line.startswith("127 rows LOST  6,101 thinned")
    sample["losses"] = {}
    assert "no losses" in panels.answer_line(sample, 120).plain


def test_devices_show_the_last_second(sample: Document) -> None:
    device = sample["devices"][0]
    last = device["timeline"][-1]
    text = panels.devices_text(sample, 120, 9).plain
    assert f"read {units.rate(last['read_bytes_per_s'])}" in text
    assert f"read depth {units.fixed(last['depth_mean'], 1)} now, 1.1 mean, p99 4" in text
    assert f"p50 {units.duration(last['read_p50_ns'])}" in text
    assert f"p99 {units.duration(last['read_p99_ns'])}" in text
    device["timeline"] = []
    mean = device["read_bytes"] / sample["capture"]["duration_ns"] * 1e9
    assert f"read {units.rate(mean)}" in panels.devices_text(sample, 120, 9).plain


@pytest.mark.parametrize("height", range(1, 9))
def test_panels_keep_to_their_height(sample: Document, height: int) -> None:
    for text in (panels.devices_text, panels.findings_text):
        assert len(text(sample, 60, height).plain.splitlines()) <= max(height, 2)
    assert ("press f" in panels.findings_text(sample, 60, height).plain) == (height < 4)


def test_position(sample: Document) -> None:
    line = panels.position_line(Position(90 * 10**9, 120 * 10**9, 0.5, ended=False), True, 80)
    assert line.plain.startswith("⏸  1:30 / 2:00  x0.5")
    assert line.cell_len <= 80


def test_a_request_page_names_every_span_and_part(sample: Document) -> None:
    row = next(row for row in sample["requests"] if row["restore"] and row["spans"])
    text = plain(details.request_text(row, 70))
    for group in ("spans", "restore"):
        for key, value in row[group].items():
            if key.endswith("_ns") and key != "exposed_ns":
                assert units.duration(value) in text
    assert units.interval(
        row["gain_ns"], row["gain_low_ns"], row["gain_high_ns"], units.duration
    ) in " ".join(text.split())


def test_a_finding_page_has_evidence_and_the_proposal(sample: Document) -> None:
    text = " ".join(plain(details.finding_text(sample, sample["findings"][0]), 200).split())
    assert "effective depth of a restore, median: 1.11 (n=194)" in text
    assert "bytes_in_flight: 2.00 MiB → 16.0 MiB" in text
    assert "would disprove" in text


@pytest.mark.parametrize("width", [60, 70, 83, 110])
def test_a_device_shows_its_path_its_queues_and_where_time_goes(
    sample: Document, width: int
) -> None:
    item = sample["devices"][3]
    text = plain(device.device_text(item, width), width)
    assert "10.7.1.21:4420, live" in text
    assert "31 segments sent again, 9 congestion events, 1 reconnect" in " ".join(text.split())
    assert "0.3 %: figures are of the others" in text
    (line,) = [line for line in text.splitlines() if line.startswith("nvme1 q2")]
    queue = item["queues"][1]
    assert units.duration(queue["latency"]["median_ns"]) in line
    assert units.duration(queue["latency"]["p99_ns"]) in line
    assert units.fixed(queue["mean_depth"]) in line
    assert f"{queue['peak_depth']}" in line.split()
    assert (units.count(queue["commands"]) in line) is (width >= 84)
    assert "[driver queueing + wire + target] 95.1 %" in text
    assert "nvme_tcp_try_send" in text
    assert "…" not in text


def test_a_device_that_is_no_path_has_no_line_for_one(sample: Document) -> None:
    text = plain(device.device_text(sample["devices"][0], 80), 80)
    assert "on the path" not in text and "hw 0" in text
    unknown = plain(device.device_text(sample["devices"][1], 80), 80)
    assert "the queue of its commands is not known" in unknown


WHOLE = document()


@given(st.integers(0, 2**32), st.floats(0, 1))
def test_nulls_anywhere_never_raise_on_the_screen(seed: int, share: float) -> None:
    rng = random.Random(seed)
    broken = copy.deepcopy(WHOLE | {"requests": WHOLE["requests"][::19]})
    for container, key in leaves(broken):
        if rng.random() < share * 0.3:
            container[key] = None
    snapshot = Snapshot(broken, 10**15)
    panels.title_line(broken, "live", 80)
    panels.answer_line(broken, 80)
    panels.waiting_text(snapshot)
    panels.devices_text(broken, 80, 3)
    panels.findings_text(broken, 80, 3)
    for row in ordered(rows(broken, "requests"), "verdict", Moment(1)):
        cells(row, COLUMNS, Moment(1))
        plain(details.request_text(row, 60))
    for finding in rows(broken, "findings"):
        plain(details.finding_text(broken, finding))
    for item in rows(broken, "devices"):
        device.device_title(item, 60)
        assert "None" not in plain(device.device_text(item, 60))


def test_all_unknown_is_not_paid_off_for_none() -> None:
    found = document()
    for row in found["requests"]:
        row.update(verdict="unknown", gain_ns=None, gain_low_ns=None, gain_high_ns=None)
    assert "paid off: unknown for all 194" in panels.answer_line(found, 120).plain
    row = next(row for row in found["requests"] if row["restore"] and row["ttft_ns"])
    assert verdict(row).plain == "unknown"
    row.update(gain_ns=3, gain_low_ns=-7, gain_high_ns=11)
    assert verdict(row).plain == "open"
    assert "paid off 0/194, 193 unknown" in panels.answer_line(found, 120).plain
    row["restore"]["device_ns"] = None
    assert part_bar(row, 7).plain == ""
