"""``kvprobe top``: the live screen, of this machine or of a capture."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import TYPE_CHECKING

from kvprobe import content
from kvprobe.commands import Command
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


def run(options: Namespace) -> int:
    """Show the screen until somebody quits it."""
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        what = options.replay or "FILE"
        raise KvprobeError(
            "top needs a terminal, and stdout or stdin is none",
            f"`kvprobe report {what}` prints the same figures",
        )
    feed = _replay(options) if options.replay else _live(options)
    from kvprobe.dashboard.app import Dashboard

    app = Dashboard(feed, _playbook)
    try:
        app.run()
    finally:
        feed.close()
    return app.return_code or ExitCode.OK


def _replay(options: Namespace) -> Feed:
    from kvprobe import document
    from kvprobe.capture.reader import open_capture
    from kvprobe.dashboard.feed import ReplayFeed

    capture = open_capture(options.replay)
    return ReplayFeed(
        capture, capture.manifest, options.window, document.build, options.speed or 1.0
    )


def _playbook(slug: str) -> str | None:
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
