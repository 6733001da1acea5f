"""The text of the GPUs: lines of the devices panel and the page of all. Pure."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvprobe import units
from kvprobe.dashboard.details import pairs
from kvprobe.dashboard.panels import devices_text, fitted
from kvprobe.digest import Document, number, pick, rows
from kvprobe.gpu_words import PREFILLS, describe, name_of, why_unknown


def devices_and_gpus(document: Document | None, width: int, height: int) -> Text:
    """The devices panel: storage first, the GPUs below it in at most a third of the lines."""
    lines = gpu_lines(document, width, max(1, height // 3))
    room = max(1, height - len(lines))
    storage = devices_text(document, width, room).split("\n")[:room]
    return Text("\n").join([*storage, *lines])


_ORDER = {True: 0, None: 1, False: 2}


def gpu_lines(document: Document | None, width: int, most: int) -> list[Text]:
    """A line a GPU, at most ``most``: those that serve the engine first, the most starved first."""
    items = sorted(
        rows(document, "gpus"),
        key=lambda item: (_ORDER.get(pick(item, "follows_prefills"), 1), -_starved_share(item)),
    )
    lines = [_line(item, width) for item in items[:most]]
    if lines and len(items) > most:
        more = f"  and {len(items) - most} more: press g"
        lines[-1] = Text.assemble(_line(items[most - 1], width - len(more)), (more, "dim"))
    return lines


def _starved_share(item: Any) -> float:
    starved, covered = (
        number(pick(item, "starvation"), key) for key in ("starved_ns", "covered_ns")
    )
    return starved / covered if starved and covered else 0.0


def _line(item: Any, width: int) -> Text:
    segments = [Text(name_of(item)[0], "bold cyan")]
    for name, metric in (
        ("works", "graphics_activity_share"),
        ("a kernel ran", "kernel_time_share"),
        ("memory", "dram_bandwidth_share"),
        ("tensor cores", "tensor_activity_share"),
    ):
        if (share := number(item, "metrics", metric, "mean")) is not None:
            segments.append(Text(f"{name} {units.share(share)}"))
    if pick(item, "follows_prefills") is False:
        segments.insert(1, Text("serves others, or none", "dim"))
    elif number(pick(item, "starvation"), "restores"):
        share = _starved_share(item)
        segments.insert(2, Text(f"starved {units.share(share)}", "yellow" if share > 0.05 else ""))
    rate = number(item, "metrics", "pcie_rx_bytes_per_s", "mean")
    if rate is not None:
        segments.append(Text(f"PCIe in {units.rate(rate)}"))
    if number(pick(item, "throttling"), "held"):
        segments.append(Text("throttled", "yellow"))
    return fitted(segments, width)


def gpus_text(document: Document | None, width: int) -> RenderableType:
    """Everything about every GPU."""
    items = rows(document, "gpus")
    if not items:
        why = pick(document, "capture", "gpu_why_none")
        return Text(f"No GPU is sampled: {why}." if why else "No GPU was seen.")
    parts: list[RenderableType] = []
    for item in items:
        name, what = name_of(item)
        parts += [Text.assemble((name, "bold cyan"), f"  {what}"), pairs(describe(item))]
        if groups := rows(item, "prefills"):
            parts.append(_prefills(groups, roomy=width >= 84))
        if why := why_unknown(item):
            parts.append(pairs([("unknown", why)]))
        parts.append(Text(""))
    return Group(*parts)


def _prefills(groups: list[Any], roomy: bool) -> Table:
    columns = [each for each in PREFILLS if roomy or each[0] not in ("time", "n")]
    table = Table(box=None, padding=(0, 2 if roomy else 1, 0, 0), header_style="dim")
    for title, _ in columns:
        table.add_column(title, justify="right", no_wrap=True)
    for group in groups:
        table.add_row(*(show(group) for _, show in columns))
    return table
