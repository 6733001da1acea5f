"""The application as a person drives it: keys, orders, pages, trouble."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from textual.pilot import Pilot
from textual.widgets import DataTable, Markdown, OptionList, Static

from kvprobe import units
from kvprobe.dashboard.app import Dashboard
from kvprobe.dashboard.feed import Snapshot
from kvprobe.dashboard.screens import DevicesPage, FindingsPage, TextPage
from kvprobe.dashboard.table import COLUMNS, columns_for
from tests.dashboard.conftest import GivenFeed

Document = dict[str, Any]
Script = Callable[[Dashboard, Pilot[None]], Coroutine[Any, Any, None]]

INTERVAL = 0.2


def drive(feed: GivenFeed, script: Script, size: tuple[int, int] = (80, 24)) -> None:
    """Run the application on ``feed`` and let ``script`` use it."""

    async def main() -> None:
        app = Dashboard(feed, lambda slug: f"# about {slug}", INTERVAL)
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: feed.asked > 0 and not app._busy)
            await script(app, pilot)

    asyncio.run(main())


async def until(pilot: Pilot[None], done: Callable[[], bool]) -> None:
    """Wait for something that a timer or a thread brings about."""
    for _ in range(200):
        await pilot.pause(0.02)
        if done():
            return
    raise AssertionError("it did not happen")


def shown(app: Dashboard, name: str) -> str:
    """The text of one part of the screen."""
    return str(app.query_one(name, Static).render())


def table_ids(app: Dashboard) -> list[str]:
    """The first column of the table."""
    table = app.query_one(DataTable)
    return [str(table.get_row_at(index)[0]).strip() for index in range(table.row_count)]


def test_newest_first_and_figures_of_the_document(live: Snapshot) -> None:
    async def script(app: Dashboard, pilot: Pilot[None]) -> None:
        assert live.document is not None
        newest = sorted(live.document["requests"], key=lambda row: -row["t_arrival_ns"])
        ids = table_ids(app)
        assert len(ids) == 61
        assert ids[1:4] == [row["id"] for row in newest[1:4]]
        assert ids[0] == "chat…901"
        keys = [column.key for column in columns_for(80)]
        cells = [str(cell).strip() for cell in app.query_one(DataTable).get_row_at(1)]
        row = dict(zip(keys, cells, strict=True))
        assert row["ttft"] == units.duration(newest[1]["ttft_ns"])
        assert row["bytes"] == units.size(newest[1]["restore"]["bytes"])
        assert row["restore"] == units.duration(newest[1]["restore"]["exposed_ns"])
        assert row["recompute"] == units.duration(newest[1]["recompute"]["estimate_ns"])
        assert row["tied"] == "thread"
        assert "127 rows LOST" in shown(app, "#answer")
        assert "serial_restore" in shown(app, "#findings")
        assert "loop3" in shown(app, "#devices")

    drive(GivenFeed(live), script)


@pytest.mark.parametrize("width", [80, 100, 120, 140, 200])
def test_the_table_fits_the_screen(live: Snapshot, width: int) -> None:
    async def script(app: Dashboard, pilot: Pilot[None]) -> None:
        table = app.query_one(DataTable)
        assert table.virtual_size.width <= width
        assert table.max_scroll_x == 0
        for name in ("#title", "#answer", "#devices", "#findings"):
            widget = app.query_one(name, Static)
            room = widget.content_size.width
            assert all(len(line) <= room for line in shown(app, name).splitlines())

    drive(GivenFeed(live), script, (width, 24))


def test_s_goes_through_the_orders(live: Snapshot) -> None:
    async def script(app: Dashboard, pilot: Pilot[None]) -> None:
        assert live.document is not None
        rows = {row["id"]: row for row in live.document["requests"]}
        await pilot.press("s")
        lost = [row["gain_ns"] for row in rows.values() if str(row["verdict"]).endswith("_lost")]
        first = [rows[name]["gain_ns"] for name in table_ids(app)[: len(lost)]]
        assert first == sorted(lost)
        await pilot.press("s")
        times = [rows[name]["ttft_ns"] for name in table_ids(app)[:47]]
        assert times == sorted(times, reverse=True)
        assert "longest TTFT first" in str(app.query_one("#requests").border_title)
        for _ in range(3):
            await pilot.press("s")
        assert app.sort_column == "id"

    drive(GivenFeed(live), script)


def test_a_heading_sorts_and_again_the_other_way(live: Snapshot) -> None:
    async def script(app: Dashboard, pilot: Pilot[None]) -> None:
        assert live.document is not None
        stored = sorted(row["tokens"]["stored"] for row in live.document["requests"])
        x = sum(c.width + 1 for c in columns_for(80)[:2]) + 2
        column = [c.key for c in columns_for(80)].index("stored")
        table = app.query_one(DataTable)
        await pilot.click(DataTable, offset=(x, 0))
        assert str(table.get_row_at(0)[column]).strip() == units.count(stored[-1])
        await pilot.click(DataTable, offset=(x, 0))
        assert str(table.get_row_at(0)[column]).strip() == units.count(stored[0])

    drive(GivenFeed(live), script)


def test_space_holds_the_screen(live: Snapshot) -> None:
    feed = GivenFeed(live)

    async def script(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("space")
        await until(pilot, lambda: not app._busy)
        asked = feed.asked
        feed.current = Snapshot(None, 0)
        await pilot.pause(3 * INTERVAL)
        assert feed.asked == asked
        assert app.snapshot.document is live.document
        assert "held" in shown(app, "#title")
        await pilot.press("space")
        await until(pilot, lambda: app.snapshot.document is None)
        assert feed.calls == ["pause True", "pause False"]

    drive(feed, script)


def test_the_screen_answers_while_a_snapshot_takes_long(live: Snapshot) -> None:
    feed = GivenFeed(live)

    async def script(app: Dashboard, pilot: Pilot[None]) -> None:
        feed.gate = threading.Event()
        asked = feed.asked
        await until(pilot, lambda: app._busy and feed.asked > asked)
        await pilot.press("s")
        assert app.sort_column == "verdict"
        await pilot.pause(3 * INTERVAL)
        assert feed.asked == asked + 1, "one question at a time"
        feed.gate.set()
        await until(pilot, lambda: feed.asked > asked + 1)

    drive(feed, script)


def test_enter_opens_the_request_under_the_cursor(live: Snapshot) -> None:
    async def script(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("down", "down", "enter")
        await until(pilot, lambda: isinstance(app.screen, TextPage))
        await pilot.pause(0.05)
        frame = app.screen.query_one(".frame")
        assert "req-0208" in str(frame.border_title)
        await pilot.press("escape")
        assert not isinstance(app.screen, TextPage)

    drive(GivenFeed(live), script)


@pytest.mark.parametrize("size", [(140, 40), (80, 24)])
def test_keys_work_at_once_when_the_first_requests_come_late(
    live: Snapshot, size: tuple[int, int]
) -> None:
    feed = GivenFeed(Snapshot())

    async def script(app: Dashboard, pilot: Pilot[None]) -> None:
        feed.current = live
        await until(pilot, lambda: app.query_one(DataTable).row_count > 0)
        await pilot.pause()
        assert isinstance(app.focused, DataTable)
        await pilot.press("down", "enter")
        await until(pilot, lambda: isinstance(app.screen, TextPage))
        assert "req-0209" in str(app.screen.query_one(".frame").border_title)
        await pilot.pause(3 * INTERVAL)
        assert isinstance(app.screen, TextPage)

    drive(feed, script, size)


def test_the_cursor_stays_on_its_request(live: Snapshot, sample: Document) -> None:
    feed = GivenFeed(live)

    async def script(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("down", "down", "down")
        assert app._selected_id() == "req-0207"
        newer = dict(sample["requests"][5], id="new-1", t_arrival_ns=live.now_ns)
        more = {**sample, "requests": [*sample["requests"], newer]}
        feed.current = Snapshot(more, live.now_ns)
        await until(pilot, lambda: table_ids(app)[0] == "new-1")
        assert app._selected_id() == "req-0207"
        assert app.query_one(DataTable).cursor_row == 4

    drive(feed, script)


def test_d_shows_the_devices_and_goes_on_with_the_screen(
    live: Snapshot, replayed: Snapshot
) -> None:
    for snapshot in (live, replayed):
        feed = GivenFeed(snapshot)

        async def script(app: Dashboard, pilot: Pilot[None], feed: GivenFeed = feed) -> None:
            await pilot.press("d")
            await until(pilot, lambda: isinstance(app.screen, DevicesPage))
            page = app.screen
            assert isinstance(page, DevicesPage)
            await until(pilot, lambda: page.query_one(OptionList).option_count == 4)
            assert shown_device(page) == "loop3"
            await pilot.press("down", "down", "down")
            await until(pilot, lambda: shown_device(page) == "nvme3c1n1")
            # A newer document, in another order: the chosen one stays, its figures are new.
            newer = json.loads(json.dumps(feed.current.document))
            newer["devices"] = [newer["devices"][3], *newer["devices"][:3]]
            newer["devices"][0]["queues"][0]["peak_depth"] = 977
            feed.current = replace(feed.current, document=newer)
            await until(pilot, lambda: "977" in device_page_text(page))
            assert shown_device(page) == "nvme3c1n1"
            assert page.query_one(OptionList).highlighted == 0
            newer = dict(newer, devices=newer["devices"][1:2])
            feed.current = replace(feed.current, document=newer)
            await until(pilot, lambda: shown_device(page) == "loop3")
            await pilot.press("escape")
            await until(pilot, lambda: not isinstance(app.screen, DevicesPage))

        drive(feed, script)


def test_d_without_a_device_says_so() -> None:
    async def script(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("d")
        await until(pilot, lambda: isinstance(app.screen, DevicesPage))
        page = app.screen
        assert isinstance(page, DevicesPage)
        await until(pilot, lambda: "No device was seen." in device_page_text(page))

    drive(GivenFeed(Snapshot({"devices": None})), script)


def shown_device(page: DevicesPage) -> str | None:
    """The name of the device whose figures are shown."""
    return page._chosen


def device_page_text(page: DevicesPage) -> str:
    """The text below the list."""
    console = Console(width=120, file=StringIO(), _environ={})
    with console.capture() as captured:
        console.print(page.shown)
    return captured.get()


def test_f_shows_findings_with_their_playbooks(live: Snapshot) -> None:
    async def script(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("f")
        await until(pilot, lambda: isinstance(app.screen, FindingsPage))
        assert app.screen.query_one(OptionList).option_count == 4
        markdown = app.screen.query_one(Markdown)
        await until(pilot, lambda: "about serial_restore" in markdown.source)
        await pilot.press("down")
        await until(pilot, lambda: "about restore_loses" in markdown.source)
        await pilot.press("q")
        assert not isinstance(app.screen, FindingsPage)

    drive(GivenFeed(live), script)


def test_pages_without_anything_to_show(live: Snapshot) -> None:
    async def script(app: Dashboard, pilot: Pilot[None]) -> None:
        for key in ("f", "enter", "question_mark"):
            await pilot.press(key)
            await pilot.pause(0.05)
            await pilot.press("escape")
        assert app.is_running

    drive(GivenFeed(Snapshot()), script)


def test_says_what_it_waits_for(sample: Document) -> None:
    feed = GivenFeed(Snapshot())

    async def script(app: Dashboard, pilot: Pilot[None]) -> None:
        assert "Waiting for the first second of data" in shown(app, "#waiting")
        sample["requests"] = []
        sample["capture"]["engine"] = None
        sample["losses"]["ops"]["rows"] = 0
        feed.current = Snapshot(sample, 1)
        await until(pilot, lambda: "first request" in shown(app, "#waiting"))
        assert "--signal" in shown(app, "#waiting")
        assert "--pid" in shown(app, "#waiting")
        assert "162,013 block requests" in shown(app, "#waiting")
        assert not app.query_one(DataTable).display

    drive(feed, script)


def test_trouble_is_a_line_and_what_was_seen_stays(live: Snapshot) -> None:
    feed = GivenFeed(live)

    async def script(app: Dashboard, pilot: Pilot[None]) -> None:
        feed.failure = OSError(19, "No such device", "loop3")
        await until(pilot, lambda: "loop3" in shown(app, "#problems"))
        assert app.query_one("#problems").display
        assert len(table_ids(app)) == 61
        feed.failure = None
        await until(pilot, lambda: not app.query_one("#problems").display)

    drive(feed, script)


def test_replay_keys_and_position(replayed: Snapshot) -> None:
    feed = GivenFeed(replayed)

    async def script(app: Dashboard, pilot: Pilot[None]) -> None:
        line = shown(app, "#position")
        assert "0:23 / 1:00  x4" in line
        bar = [mark for mark in line if mark in "━─"]
        assert bar.count("━") == round(len(bar) * 23 / 60)
        await pilot.press("plus", "minus", "minus", "r")
        assert feed.calls == ["speed +1", "speed -1", "speed -1", "restart"]
        assert replayed.position is not None
        ended = replace(replayed.position, done_ns=60 * 10**9, ended=True)
        feed.current = replace(replayed, position=ended)
        await until(pilot, lambda: "end" in shown(app, "#position"))
        assert "replay" in shown(app, "#title")

    drive(feed, script)


def test_a_live_source_has_no_position(live: Snapshot) -> None:
    async def script(app: Dashboard, pilot: Pilot[None]) -> None:
        assert not app.query_one("#position").display
        assert "live" in shown(app, "#title")

    drive(GivenFeed(live), script)


def test_q_quits(live: Snapshot) -> None:
    async def script(app: Dashboard, pilot: Pilot[None]) -> None:
        await pilot.press("q")
        await until(pilot, lambda: not app.is_running)

    drive(GivenFeed(live), script)


def test_resizing_changes_the_columns(live: Snapshot) -> None:
    async def script(app: Dashboard, pilot: Pilot[None]) -> None:
        table = app.query_one(DataTable)
        assert len(table.columns) == len(columns_for(80))
        await pilot.resize_terminal(150, 40)
        await until(pilot, lambda: len(table.columns) == len(columns_for(150)))
        assert len(columns_for(150)) == len(COLUMNS) - 1
        await pilot.resize_terminal(40, 12)
        await pilot.pause(0.1)
        assert app.is_running

    drive(GivenFeed(live), script)


def test_markup_in_names_is_only_text(sample: Document) -> None:
    sample["requests"][-1]["id"] = "[red]x[/]"
    sample["findings"][0]["subject"] = "[bold"
    sample["devices"][0]["name"] = "\x1b[31m[/loop]"
    feed = GivenFeed(Snapshot(sample, 1, ("[/oops]",)))

    async def script(app: Dashboard, pilot: Pilot[None]) -> None:
        assert table_ids(app)[0].startswith("[")
        assert "[bold" in shown(app, "#findings")
        assert "[/oops]" in shown(app, "#problems")
        assert "\x1b" not in shown(app, "#devices")
        await pilot.press("enter")
        await pilot.pause(0.1)
        assert isinstance(app.screen, TextPage)
        await pilot.press("escape", "f")
        await pilot.pause(0.1)
        assert isinstance(app.screen, FindingsPage)

    drive(feed, script)
