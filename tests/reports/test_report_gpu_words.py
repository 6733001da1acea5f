"""What reports say of GPUs: words for what is unknown, for errors, for narrow pages."""

from __future__ import annotations

from typing import Any

from kvprobe.gpu_words import describe
from kvprobe.reports.text import render

FACTS = {"index": 0, "name": "NVIDIA H100", "sm_clock_hz": 1_980_000_000, "not_sampled": []}
SPREAD = {"mean": 0.5, "p95": 0.9, "highest": 1.0, "n": 41, "covered_ns": 5_000_000_000}


def gpu(**more: Any) -> dict[str, Any]:
    bare = {"facts": FACTS, "instance": None, "metrics": {"graphics_activity_share": SPREAD}}
    return {**bare, "follows_prefills": True, **more}


def words(item: dict[str, Any]) -> dict[str, str]:
    return dict(describe(item))


def test_nothing_recorded_is_said() -> None:
    assert words(gpu(metrics={})) == {"samples": "none were recorded"}


def test_the_count_of_a_bus_is_that_of_the_way_that_is_known() -> None:
    rate = SPREAD | {"mean": 1e9, "p95": 2e9}
    text = words(gpu(metrics={"nvlink_tx_bytes_per_s": rate}))["NVLink"]
    assert text.startswith("from the GPU") and "n=41" in text


def test_a_clock_that_was_always_held_back_is_shown_against_the_highest() -> None:
    held = {"readings": 29, "held": 29, "clock_held_hz": 1.2e9, "clock_free_hz": None}
    text = words(gpu(throttling=held))["throttled"]
    assert text == "100 % of the readings in prefills (n=29), at 1,200 MHz of 1,980"


def test_repeated_errors_are_counted_once() -> None:
    errors = [{"time_ns": n, "number": 31} for n in range(186)] + [{"time_ns": 7, "number": 79}]
    assert words(gpu(xids=errors))["errors"] == "Xid 31 (186 times), Xid 79"


def test_one_window_is_one_window() -> None:
    assert "of 1 window of a second" in words(gpu(windows=[{"bound": "idle"}]))["mostly"]


def test_why_prefills_are_not_judged_is_said() -> None:
    assert words(gpu(why_no_prefills="of which replica one was is not told"))["prefills"] == (
        "not judged: of which replica one was is not told"
    )


def test_the_count_fits_a_page_of_80_columns() -> None:
    shares = {"mid": 0.711, "low": 0.702, "high": 0.723, "n": 1234}
    group = {
        "tokens_low": 12_288, "tokens_high": 16_123, "prefills": 1234, "prefill_ns": 10**11,
        "samples": 12_347, "bound": "hbm_bound", "why": "", "roofline_ns": 5e10,
        "shares": {"hbm": shares, "compute": shares, "pcie": None},
    }  # fmt: skip
    text = render({"gpus": [gpu(prefills=[group])]}, width=80)
    assert "12,347" in text and "memory bandwidth" in text
    assert max(map(len, text.splitlines())) <= 80
