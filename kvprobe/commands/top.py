"""``kvprobe top``: the live screen, of this machine or of a capture."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import TYPE_CHECKING

from kvprobe.commands import Command
from kvprobe.commands._listening import listen_for
from kvprobe.commands._live import (
    add_source_options,
    filters_of,
    open_live,
    require_root,
)
from kvprobe.errors import ExitCode, KvprobeError

if TYPE_CHECKING:
    from kvprobe.dashboard.feed import Feed

WINDOW_SECONDS = 60.0


def configure(parser: ArgumentParser) -> None:
    """Add the options of ``kvprobe top``."""
    parser.add_argument("--replay", metavar="FILE", help="show a capture as if it were now")
    parser.add_argument(
        "--speed",
        type=_positive,
        metavar="X",
        help="recorded seconds per second of a replay (default: 1; + and - change it)",
    )
    parser.add_argument(
        "--window",
        type=_positive,
        default=WINDOW_SECONDS,
        metavar="SECONDS",
        help="how far back the screen looks (default: 60)",
    )
    add_source_options(parser)


def run(options: Namespace) -> int:
    """Show the screen until somebody quits it."""
    if options.speed is not None and options.replay is None:
        raise KvprobeError("--speed is for a replay", "kvprobe top --replay FILE --speed 4")
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        verb = f"report {options.replay}" if options.replay else "capture -d 30"
        raise KvprobeError(
            "top needs a terminal, and here is none",
            f"`kvprobe {verb}` prints the same figures; `kvprobe report FILE` those of a capture",
        )
    feed = _live(options) if options.replay is None else _replay(options)
    try:
        from kvprobe.dashboard.app import Dashboard

        app = Dashboard(feed, _playbook)
        app.run()
    finally:
        feed.close()
    return app.return_code or ExitCode.OK


def _live(options: Namespace) -> Feed:
    from kvprobe import document
    from kvprobe.dashboard.feed import LiveFeed

    require_root("top")
    filters = filters_of(options)
    heard = listen_for(options)
    heard.tell()
    budget = None if options.budget is None else options.budget / 100
    print("kvprobe: attaching ...", file=sys.stderr)
    try:
        source, manifest = open_live(filters, options.loader, heard, budget)
    except BaseException:
        heard.close()
        raise
    return LiveFeed(source, manifest, options.window, document.build)


def _replay(options: Namespace) -> Feed:
    from kvprobe import document
    from kvprobe.capture.reader import open_capture
    from kvprobe.dashboard.feed import ReplayFeed

    capture = open_capture(options.replay)
    for name in ("requests", "ops", "block"):  # a damaged table is told before the screen opens
        capture.frame(name)
    return ReplayFeed(
        capture, capture.manifest, options.window, document.build, options.speed or 1.0
    )


def _playbook(slug: str) -> str | None:
    from kvprobe import content

    try:
        return content.playbook(slug)
    except KvprobeError:
        return None


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise ArgumentTypeError(f"{text!r} is not a positive number")
    return value


COMMAND = Command("top", "the live screen, of this machine or of a capture", configure, run)
