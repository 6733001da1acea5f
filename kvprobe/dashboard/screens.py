"""The modal pages over the dashboard: a request, the findings, the keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from rich.console import RenderableType
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Markdown, OptionList, Static
from textual.widgets.option_list import Option

from kvprobe import digest
from kvprobe.dashboard.details import finding_text, help_text, request_text
from kvprobe.dashboard.device import device_text, device_title
from kvprobe.dashboard.panels import SEVERITY_STYLES
from kvprobe.digest import label, rows

Playbook = Callable[[str], str | None]
"""The Markdown text of a playbook by slug, or None."""

_CLOSE: list[BindingType] = [
    Binding("escape", "close", "back"),
    Binding("q", "close", "back", show=False),
]


class Page(ModalScreen[None]):
    """A framed page that Escape or q closes."""

    BINDINGS: ClassVar[list[BindingType]] = _CLOSE

    def action_close(self) -> None:
        """Back to the dashboard."""
        self.dismiss()


class TextPage(Page):
    """A page of text that is made for the width it gets."""

    def __init__(self, title: str, text: Callable[[int], RenderableType]) -> None:
        super().__init__()
        self._title = title
        self._text = text

    def compose(self) -> ComposeResult:
        """A frame with scrolling text."""
        with VerticalScroll(classes="frame") as frame:
            frame.border_title = Text(self._title)
            frame.border_subtitle = "Esc closes"
            yield Static(id="text")

    def on_resize(self) -> None:
        """Make the text for the width of now."""
        self.draw()

    def draw(self) -> None:
        """Make the text of what there is now."""
        static = self.query_one("#text", Static)
        width = self.query_one(".frame").scrollable_content_region.width
        static.update(self._text(max(40, width)))

    def on_mount(self) -> None:
        """Let the arrow keys scroll at once."""
        self.query_one(VerticalScroll).focus()


def request_page(row: Mapping[str, Any]) -> TextPage:
    """Everything about one request."""
    name = label(row, "id") or "without an id"
    return TextPage(f"request {name}", lambda width: request_text(row, width))


def help_page() -> TextPage:
    """The keys and what the columns mean."""
    return TextPage("help", lambda _: help_text())


class DevicesPage(Page):
    """The devices above, the chosen one with its queues below; goes on with the screen."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        super().__init__()
        self._devices = rows(document, "devices")
        self._chosen: str | None = None
        self.shown: RenderableType = ""
        """What is below the list."""

    def compose(self) -> ComposeResult:
        """The list and the text."""
        with Vertical(classes="frame") as frame:
            frame.border_title = "devices"
            frame.border_subtitle = "up/down chooses, Tab then scrolls, Esc closes"
            yield OptionList()
            with VerticalScroll(id="device"):
                yield Static(id="text")

    def on_mount(self) -> None:
        """Show the device that serves the KV cache, which is the first."""
        self._list()

    def take(self, document: Mapping[str, Any] | None) -> None:
        """Show a newer document; the chosen device stays chosen."""
        self._devices = rows(document, "devices")
        self._list()

    def _list(self) -> None:
        choice = self.query_one(OptionList)
        names = [label(item, "name") for item in self._devices]
        if self._chosen not in names:
            self._chosen = names[0] if names else None
        width = max(40, choice.size.width - 4)
        titles = [device_title(item, width) for item in self._devices]
        if len(titles) == choice.option_count:
            for index, title in enumerate(titles):
                choice.replace_option_prompt_at_index(index, title)
        else:
            choice.clear_options()
            choice.add_options([Option(title) for title in titles])
        choice.display = bool(titles)
        if titles:
            choice.highlighted = names.index(self._chosen)
        self._show()

    def _show(self) -> None:
        item = next((d for d in self._devices if label(d, "name") == self._chosen), None)
        width = self.query_one("#device", VerticalScroll).scrollable_content_region.width
        nothing = "No device was seen."
        self.shown = nothing if item is None else device_text(item, max(40, width))
        self.query_one("#text", Static).update(self.shown)

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Show the device under the cursor."""
        if event.option_index < len(self._devices):
            self._chosen = label(self._devices[event.option_index], "name")
            self._show()

    def on_resize(self) -> None:
        """Draw for the width of now."""
        self._list()


class FindingsPage(Page):
    """The findings above, the chosen one with its evidence and playbook below."""

    def __init__(self, document: Mapping[str, Any], playbook: Playbook) -> None:
        super().__init__()
        self._document = document
        self._playbook = playbook
        self._findings = sorted(rows(document, "findings"), key=digest.severity_rank, reverse=True)

    def compose(self) -> ComposeResult:
        """The list and the text."""
        with Vertical(classes="frame") as frame:
            frame.border_title = "findings"
            frame.border_subtitle = "up/down chooses, Tab then scrolls, Esc closes"
            yield OptionList(*(Option(_title(item)) for item in self._findings))
            with VerticalScroll(id="finding"):
                yield Static(id="text")
                yield Markdown(id="playbook")

    def on_mount(self) -> None:
        """Show the gravest one."""
        if not self._findings:
            self.query_one(OptionList).display = False
            self.query_one("#text", Static).update("Nothing was found in this window.")

    async def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        """Show the finding under the cursor."""
        finding = self._findings[event.option_index]
        self.query_one("#text", Static).update(finding_text(self._document, finding))
        text = self._playbook(label(finding, "slug") or "")
        await self.query_one(Markdown).update(text or "*This finding has no playbook here.*")
        self.query_one("#finding").scroll_home(animate=False)


def _title(finding: Any) -> Text:
    name = label(finding, "severity") or "info"
    line = Text.assemble(
        (f"{name:<8} {label(finding, 'slug') or '?'}", SEVERITY_STYLES.get(name, ""))
    )
    subject = label(finding, "subject")
    return line.append(f"  {subject}" if subject else "")
