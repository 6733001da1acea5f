"""The Textual application: takes a snapshot each second and puts it on the screen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Vertical
from textual.widgets import DataTable, Footer, Static

from kvprobe.dashboard import panels
from kvprobe.dashboard.feed import Feed, Snapshot
from kvprobe.dashboard.gpu import devices_and_gpus, gpus_text
from kvprobe.dashboard.screens import (
    DevicesPage,
    FindingsPage,
    Playbook,
    TextPage,
    help_page,
    request_page,
)
from kvprobe.dashboard.table import MOST_ROWS, ORDERS, Column, Moment, cells, columns_for, ordered
from kvprobe.digest import label, rows

INTERVAL_SECONDS = 1.0


class RequestTable(DataTable[Any]):
    """The table, whose Enter key the footer shows."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select_cursor", "request")]


class Dashboard(App[None]):
    """``kvprobe top``.

    Args:
        feed: where snapshots come from; the caller closes it.
        playbook: the Markdown text of a playbook by slug.
        interval: seconds between snapshots.
    """

    CSS_PATH = Path(__file__).with_name("dashboard.tcss")
    TITLE = "kvprobe top"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (120, "-wide")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "quit", "quit", show=False, priority=True),
        Binding("space", "hold", "hold"),
        Binding("s", "order", "sort"),
        Binding("d", "devices", "devices"),
        Binding("g", "gpus", "GPUs"),
        Binding("f", "findings", "findings"),
        Binding("question_mark", "help", "help", key_display="?"),
        Binding("plus,equals_sign", "speed(1)", "faster", show=False),
        Binding("minus", "speed(-1)", "slower", show=False),
        Binding("r", "restart", "restart", show=False),
    ]

    def __init__(self, feed: Feed, playbook: Playbook, interval: float = INTERVAL_SECONDS) -> None:
        super().__init__()
        self.feed = feed
        self.playbook = playbook
        self.interval = interval
        self.snapshot = Snapshot()
        self.held = False
        self.order = 0
        self.sort_column: str = ORDERS[0][0]
        self.sort_reverse = False
        self._busy = False
        self._columns: list[Column] = []

    def compose(self) -> ComposeResult:
        """Title, table, panels, position, keys."""
        yield Static(id="title")
        yield Static(id="answer")
        yield Static(id="problems")
        with Vertical(id="requests"):
            yield Static(id="waiting")
            yield RequestTable(id="table", cursor_type="row", cell_padding=0)
        with Container(id="lower"):
            yield Static(id="devices")
            yield Static(id="findings")
        yield Static(id="position")
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Start taking snapshots."""
        self.query_one("#requests").border_title = "requests"
        self.query_one("#devices").border_title = "devices"
        self.query_one("#findings").border_title = "findings"
        self.query_one(DataTable).focus()
        self.set_interval(self.interval, self.take_snapshot)
        self.take_snapshot()

    # ------------------------------------------------------------ data

    def take_snapshot(self) -> None:
        """Ask the feed in a thread, unless the last question is still open or the screen held."""
        if not self._busy and not self.held:
            self._busy = True
            self.run_worker(self._ask, thread=True, exit_on_error=False, group="snapshot")

    def _ask(self) -> None:
        try:
            snapshot = self.feed.snapshot()
        except Exception as error:  # a feed that breaks its word must not take the screen down
            text = " ".join(f"{type(error).__name__}: {error}".split())
            snapshot = Snapshot(self.snapshot.document, self.snapshot.now_ns, (text,))
        self.call_from_thread(self._arrived, snapshot)

    def _arrived(self, snapshot: Snapshot) -> None:
        self._busy = False
        if not self.held:
            self.snapshot = snapshot
            self.show()

    # ------------------------------------------------------------ drawing

    def on_resize(self) -> None:
        """Draw again: columns and panels depend on the width."""
        self.call_after_refresh(self.show)

    def show(self) -> None:
        """Put the snapshot on the screen."""
        snapshot, width = self.snapshot, self.size.width
        position = snapshot.position
        mode = "held" if self.held else "replay" if position else "live"
        self._put("#title", panels.title_line(snapshot.document, mode, width - 2))
        self._put("#answer", panels.answer_line(snapshot.document, width - 2))
        self._put(
            "#problems", panels.problem_lines(snapshot, width - 2), show=bool(snapshot.problems)
        )
        line = panels.position_line(position, self.held, width - 2) if position else ""
        self._put("#position", line, show=position is not None)
        self._show_requests()
        for name, text in (
            ("#devices", devices_and_gpus),
            ("#findings", panels.findings_text),
        ):
            size = self.query_one(name).content_size
            self._put(name, text(snapshot.document, size.width, size.height))
        if isinstance(self.screen, DevicesPage):
            self.screen.take(snapshot.document)
        elif isinstance(self.screen, TextPage):
            self.screen.draw()

    def _put(self, name: str, text: Any, *, show: bool = True) -> None:
        static = self.query_one(name, Static)
        static.display = show
        static.update(text)

    def _show_requests(self) -> None:
        found = rows(self.snapshot.document, "requests")
        table = self.query_one(DataTable)
        table.display = bool(found)
        if found and self.screen.focused is None and len(self.screen_stack) == 1:
            table.focus()  # a table that is not displayed cannot hold the focus
        self._put("#waiting", panels.waiting_text(self.snapshot), show=not found)
        moment = Moment(self.snapshot.now_ns)
        shown = ordered(found, self.sort_column, moment, self.sort_reverse)[:MOST_ROWS]
        words = dict(ORDERS).get(self.sort_column, f"by {self.sort_column}")
        if self.sort_reverse:
            words = f"by {self.sort_column}, smallest first"
        count = f"{len(found):,}"
        if len(shown) < len(found):
            count = f"{len(shown):,} of {len(found):,}"
        self.query_one("#requests").border_title = f"requests: {count}, {words}"
        self._fill(table, shown, moment)

    def _fill(self, table: DataTable[Any], shown: list[Mapping[str, Any]], moment: Moment) -> None:
        """Write the rows anew; the cursor stays on its request, or at the top if it was there."""
        columns = columns_for(self.size.width)
        kept = self._selected_id() if table.cursor_row > 0 else None
        scroll_y = table.scroll_y
        if columns != self._columns:
            self._columns = columns
            table.clear(columns=True)
            for column in columns:
                title = column.title.rjust(column.width) if column.right else column.title
                table.add_column(title, width=column.width + 1, key=column.key)
        else:
            table.clear()
        place = 0
        for index, row in enumerate(shown):
            key = f"{index}:{label(row, 'id')}"
            if kept is not None and label(row, "id") == kept:
                place = index
            table.add_row(*cells(row, columns, moment), key=key)
        if place:
            table.move_cursor(row=place, scroll=False)
            table.scroll_to(y=scroll_y, animate=False)

    def _selected_id(self) -> str | None:
        table = self.query_one(DataTable)
        if not table.is_valid_row_index(table.cursor_row):
            return None
        key = table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value
        return None if key is None else key.partition(":")[2]

    # ------------------------------------------------------------ keys

    def action_hold(self) -> None:
        """Hold the screen, or let it go on."""
        self.held = not self.held
        self.feed.pause(self.held)
        self.show()
        self.take_snapshot()

    def action_order(self) -> None:
        """Next order of the table."""
        keys = [key for key, _ in ORDERS]
        at = keys.index(self.sort_column) if self.sort_column in keys else -1
        self.sort_column = keys[(at + 1) % len(keys)]
        self.sort_reverse = False
        self.show()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        """Sort by the heading that was clicked; again: the other way round."""
        column = next((c for c in self._columns if c.key == event.column_key.value), None)
        if column is None or column.order is None:
            return
        self.sort_reverse = self.sort_column == column.key and not self.sort_reverse
        self.sort_column = column.key
        self.show()

    def on_data_table_row_selected(self, _: DataTable.RowSelected) -> None:
        """Enter or a click on a row."""
        self._open_request()

    def _open_request(self) -> None:
        wanted = self._selected_id()
        for row in rows(self.snapshot.document, "requests"):
            if wanted is not None and str(label(row, "id")) == wanted:
                self.push_screen(request_page(row))
                return

    def action_devices(self) -> None:
        """The devices with their paths and queues."""
        self.push_screen(DevicesPage(self.snapshot.document or {}))

    def action_gpus(self) -> None:
        """The GPUs: what they did, and what bound the prefills."""
        self.push_screen(TextPage("GPUs", lambda width: gpus_text(self.snapshot.document, width)))

    def action_findings(self) -> None:
        """The findings with evidence and playbooks."""
        self.push_screen(FindingsPage(self.snapshot.document or {}, self.playbook))

    def action_help(self) -> None:
        """The keys and the columns."""
        self.push_screen(help_page())

    def action_speed(self, steps: int) -> None:
        """Make a replay faster or slower."""
        self.feed.change_speed(steps)
        self.take_snapshot()

    def action_restart(self) -> None:
        """Begin a replay anew."""
        self.feed.restart()
        self.take_snapshot()
