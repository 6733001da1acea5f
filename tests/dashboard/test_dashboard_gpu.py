"""The GPUs in ``kvprobe top``: a line on the panel, a page, a row of a request."""

import asyncio
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from kvprobe.correlator.gpu.analysis import with_gpus
from kvprobe.dashboard.app import Dashboard
from kvprobe.dashboard.details import request_text
from kvprobe.dashboard.feed import Snapshot
from kvprobe.dashboard.gpu import devices_and_gpus, gpu_lines, gpus_text
from tests.correlator.gpu_node import SMALL, Node, sampling
from tests.dashboard.conftest import Document, GivenFeed


def with_gpu(document: Document) -> Document:
    """The sample with a GPU that starves for a known part of the time."""
    node = Node(60, seed=5)
    at = 3.0
    for number in range(199):
        if number % 2:
            at = node.request(at, 97, copy_bytes=1_500_000_007)
        else:
            at = node.request(at, prefill_ms=7, new=101, shares=SMALL)
        at += node.random.exponential(61)
    (gpu,) = with_gpus(node.ledger(), node.frame(), sampling()).gpus
    document["gpus"] = [asdict(gpu)]
    return document


def drawn(renderable: Any, width: int) -> str:
    console = Console(width=width)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


def test_a_line_says_what_a_gpu_does_and_how_far_it_starves(sample: Document) -> None:
    (line,) = gpu_lines(with_gpu(sample), 110, 3)
    starved = sample["gpus"][0]["starvation"]
    share = starved["starved_ns"] / starved["covered_ns"]
    assert share > 0.1
    assert f"starved {share * 100:.1f} %" in line.plain
    assert line.plain.startswith("GPU 0")
    assert line.cell_len <= 110


def test_of_many_gpus_the_most_starved_are_shown(sample: Document) -> None:
    item = with_gpu(sample)["gpus"][0]
    worse = dict(item["starvation"], starved_ns=item["starvation"]["covered_ns"] // 2)
    for index in range(1, 8):
        facts = asdict(replace(item["facts"], index=index)) if not isinstance(
            item["facts"], dict) else item["facts"] | {"index": index}  # fmt: skip
        sample["gpus"].append(item | {"facts": facts})
    sample["gpus"][5]["starvation"] = worse
    lines = [line.plain for line in gpu_lines(sample, 100, 2)]
    assert lines[0].startswith("GPU 5") and "starved 50.0 %" in lines[0]
    assert lines[1].endswith("and 6 more: press g")


def test_a_gpu_that_serves_comes_before_one_that_idles_for_others(sample: Document) -> None:
    item = with_gpu(sample)["gpus"][0]
    idle = dict(item["starvation"], starved_ns=item["starvation"]["covered_ns"])
    facts = asdict(item["facts"]) if not isinstance(item["facts"], dict) else item["facts"]
    other = item | {"facts": facts | {"index": 7}, "starvation": idle, "follows_prefills": False}
    sample["gpus"] = [other, item]
    first, second = (line.plain for line in gpu_lines(sample, 100, 2))
    assert first.startswith("GPU 0") and "starved" in first
    assert second.startswith("GPU 7  serves others, or none") and "starved" not in second
    page = drawn(gpus_text(sample, 100), 100)
    assert page.count("while a restore was in flight") == 1
    assert "none of this engine's prefills" in page


def test_the_panel_keeps_room_for_storage_and_one_line_for_gpus(sample: Document) -> None:
    text = devices_and_gpus(with_gpu(sample), 78, 2).plain.splitlines()
    assert len(text) == 2
    assert text[0].startswith("loop3") and text[1].startswith("GPU 0")
    sample["gpus"] = []
    assert "GPU" not in devices_and_gpus(sample, 78, 2).plain


def test_the_page_shows_all_or_why_there_is_nothing(sample: Document) -> None:
    text = drawn(gpus_text(with_gpu(sample), 100), 100)
    for words in ("memory bandwidth", "starved", "last leg", "arithmetic", "roofline"):
        assert words in text
    none = {"capture": {"gpu_why_none": "libnvidia-ml.so.1 is not installed"}, "gpus": []}
    assert "libnvidia-ml.so.1 is not installed" in drawn(gpus_text(none, 80), 80)
    assert "No GPU was seen" in drawn(gpus_text(None, 80), 80)


def test_a_request_tells_what_bound_its_prefill(sample: Document) -> None:
    row = sample["requests"][0]
    assert "bound by" not in drawn(request_text(row, 100), 100)
    row["prefill"] = {"bound": "compute_bound", "least_ns": 31e6, "share": 0.47, "limit": "compute"}
    text = drawn(request_text(row, 100), 100)
    assert "bound by arithmetic; at least 31.0 ms by its arithmetic, 47.0 %" in text


def test_g_opens_the_page_and_it_goes_on_with_the_screen(sample: Document) -> None:
    capture = sample["capture"]
    now = capture["start_ns"] + capture["duration_ns"]
    feed = GivenFeed(Snapshot(with_gpu(sample), now))

    async def run() -> tuple[str, str]:
        app = Dashboard(feed, lambda slug: None)
        async with app.run_test(size=(120, 40)) as pilot:
            await pilot.pause(0.2)
            await pilot.press("g")
            await pilot.pause(0.2)
            first = app.export_screenshot()
            feed.current = Snapshot({**sample, "gpus": []}, now)
            app.take_snapshot()
            await pilot.pause(0.4)
            return first, app.export_screenshot()

    first, second = asyncio.run(run())
    assert "roofline" in first
    assert "roofline" not in second
