"""``kvprobe capture``: record this machine for a while, keep it in one file, say what was seen."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from kvprobe.capture.manifest import Manifest
from kvprobe.commands import Command
from kvprobe.commands._child import Child
from kvprobe.commands._listening import Listening, about_to_run, listen_for
from kvprobe.commands._live import (
    add_source_options,
    filters_of,
    open_live,
    require_root,
)
from kvprobe.commands._page import page_options
from kvprobe.commands._progress import progress_of
from kvprobe.errors import ExitCode, KvprobeError
from kvprobe.model import Filters
from kvprobe.sources.live import LiveSource

EXPORT_SECONDS = 5.5
"""OpenTelemetry's exporters send every 5 s: so long after the end the last spans are waited for."""


def configure(parser: ArgumentParser) -> None:
    """Add the options of ``kvprobe capture``."""
    parser.add_argument(
        "-d", "--duration", type=_seconds, metavar="SECONDS", help="how long to record"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="the capture file (default: kvprobe-DATE-TIME.kvcap here)",
    )
    parser.add_argument(
        "--redact",
        action="store_true",
        help="hash paths, host names, addresses, request ids and keys",
    )
    parser.add_argument("--force", action="store_true", help="replace a file of that name")
    parser.add_argument(
        "--finish",
        action="store_true",
        help="record nothing: pack what a recording of that -o FILE left that was cut off",
    )
    parser.add_argument("--json", action="store_true", help="print the report document")
    parser.add_argument(
        "--fail-on",
        choices=("info", "warning", "critical"),
        help="exit with 1 when there is a finding of this severity or above",
    )
    add_source_options(parser)
    parser.add_argument(
        "command",
        nargs="*",
        metavar="-- COMMAND",
        help="trace this command and record until it ends; -d ends it earlier. "
        "Its output goes to stderr",
    )


def run(options: Namespace) -> int:
    """Record, pack, report. Ctrl-C ends the recording early and still makes the file."""
    if options.finish:
        return _finish(options)
    _check(options)
    require_root("capture")
    out = Path(options.output or time.strftime("kvprobe-%Y%m%d-%H%M%S.kvcap"))
    filters = filters_of(options)
    with _own_process(options.command) as child:  # first: listening takes threads
        command = None
        if child is not None:
            filters = replace(filters, tgids=(*filters.tgids, child.pid))
            command = about_to_run(child.pid, options.command)
        heard = listen_for(options, command)
        if heard.signal is not None:
            heard.signal.patience_s = EXPORT_SECONDS
        try:
            facts = _record(options, out, filters, heard, child)
        finally:
            heard.close()
    for line in heard.counts():
        print(f"kvprobe: {line}", file=sys.stderr)
    return _conclude(options, out, facts)


def _check(options: Namespace) -> None:
    """Refuse options that contradict each other.

    Raises:
        KvprobeError: which ones, and what to say instead.
    """
    if options.duration is None and not options.command:
        raise KvprobeError(
            "how long to record is not said", "kvprobe capture -d 30, or a command after --"
        )
    if options.command and options.pid:
        raise KvprobeError(
            "--pid and a command exclude each other", "leave one out: each names whom to trace"
        )
    if options.command and shutil.which(options.command[0]) is None:
        raise KvprobeError(
            f"no command {options.command[0]!r}",
            "the command comes after --, as in: kvprobe capture -- python3 server.py",
        )


@contextmanager
def _own_process(command: list[str]) -> Iterator[Child | None]:
    """The command, waiting to be released; ended in the end, whatever happens."""
    if not command:
        yield None
        return
    child = Child(command)
    try:
        yield child
    finally:
        child.stop()


def _record(
    options: Namespace,
    out: Path,
    filters: Filters,
    heard: Listening,
    child: Child | None,
) -> Manifest:
    """Record into ``out`` and return what its manifest says."""
    from kvprobe.capture.record import record
    from kvprobe.capture.recorder import Recorder

    with _Interrupt() as interrupt:
        recorder = Recorder(out, options.force)
        heard.tell()
        try:
            source, manifest = _attach(options, filters, heard, child, interrupt)
        except BaseException:
            recorder.discard()
            raise
        progress = progress_of(options.duration, shared=child is not None)
        try:
            final = record(
                source,
                recorder,
                manifest,
                _until(manifest.start_ns, options.duration, child, interrupt),
                progress.recording,
            )
            final = replace(
                final,
                complete=True,
                signal_understood=source.understood if heard.signal else None,
                signal_ignored=source.ignored if heard.signal else None,
                notes=(
                    *final.notes,
                    *source.notes(),
                    *_said_of(child, options.duration, interrupt),
                    *heard.notes(),
                    *_unseen(options, final, heard, source.understood),
                ),
            )
            if child is not None:
                child.stop()
            return recorder.finish(final, progress.packing, _redactor(options))
        except (KeyboardInterrupt, KvprobeError) as error:
            raise _cut_off(error, recorder.part, out) from error
        finally:
            progress.close()
            recorder.leave()


def _attach(
    options: Namespace,
    filters: Filters,
    heard: Listening,
    child: Child | None,
    interrupt: _Interrupt,
) -> tuple[LiveSource, Manifest]:
    """The source and the facts as recording begins; the command runs from here on.

    Raises:
        KeyboardInterrupt: a signal to stop came before there was anything to record.
        KvprobeError: this machine cannot be traced, or the command cannot be run.
    """
    budget_share = None if options.budget is None else options.budget / 100
    try:
        source, manifest = open_live(filters, options.loader, heard, budget_share)
    except KvprobeError as error:
        if interrupt.seen:  # the signal has also ended a compiler that attaching waited for
            raise KeyboardInterrupt from error
        raise
    try:
        if interrupt.seen:
            raise KeyboardInterrupt
        if child is not None:
            child.release()
    except BaseException:
        source.close()
        raise
    return source, replace(manifest, redact_when_packed=options.redact)


def _cut_off(error: KeyboardInterrupt | KvprobeError, part: Path, out: Path) -> KvprobeError:
    """What to say of a recording that could not be finished: where its rows are."""
    what, code = "interrupted", ExitCode.INTERRUPTED
    if isinstance(error, KvprobeError):
        what, code = error.message, ExitCode.INCOMPLETE
    return KvprobeError(
        f"{what}; everything recorded is in {part}",
        f"kvprobe capture --finish -o {out} packs it",
        code,
    )


class _Interrupt:
    """The first signal to stop is noted, a second one raises ``KeyboardInterrupt``.

    Noted, because an exception that is raised while libbpf calls back is lost.
    SIGHUP is one, unless it is ignored (nohup): a lost connection must not cost the capture.
    """

    def __init__(self) -> None:
        self.seen = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.seen:
            raise KeyboardInterrupt
        self.seen = True


def _until(
    start_ns: int, seconds: float | None, child: Child | None, interrupt: _Interrupt
) -> Callable[[int], bool]:
    end_ns = None if seconds is None else start_ns + int(seconds * 1e9)

    def stop(now_ns: int) -> bool:
        if interrupt.seen or (end_ns is not None and now_ns >= end_ns):
            return True
        return child is not None and child.ended()

    return stop


def _said_of(child: Child | None, seconds: float | None, interrupt: _Interrupt) -> Iterator[str]:
    """Notes on how the recording ended, where that matters to a reader."""
    if interrupt.seen and seconds is not None:
        yield f"ended by hand before the {seconds:g} s were over"
    if child is not None and child.ended() and child.status != 0:
        yield f"the traced command ended with status {child.status}"


def _unseen(
    options: Namespace, final: Manifest, heard: Listening, understood: int
) -> Iterator[str]:
    """Notes on what was asked for and did not show up: a wrong name looks like a quiet machine."""
    if heard.signal is not None and understood == 0:
        yield "no request event was read from the signal; requests are unknown"
    losses = [loss for name, loss in final.losses.items() if name in ("ops", "lookups", "block")]
    if (options.root or options.pid) and not any(x.rows + x.lost + x.thinned for x in losses):
        asked = [
            text
            for text, given in (("by --pid", options.pid), ("under --root", options.root))
            if given
        ]
        yield f"no read, write or lookup was seen {' '.join(asked)}"


def _redactor(options: Namespace) -> Any:
    if not options.redact:
        return None
    from kvprobe.capture.redact import Redactor

    return Redactor()


def _finish(options: Namespace) -> int:
    """Pack what a recording left behind."""
    from kvprobe.capture.part import part_of
    from kvprobe.capture.recorder import pack_abandoned

    if options.output is None:
        raise KvprobeError("--finish needs -o FILE", "the name that the recording was given")
    if options.command or options.duration is not None:
        raise KvprobeError("--finish records nothing", "leave out -d and the command")
    out = Path(options.output)
    if out.name.endswith(".part"):
        out = out.with_suffix("")
    progress = progress_of(None)
    try:
        facts = pack_abandoned(
            part_of(out), out, options.force, progress.packing, _redactor(options)
        )
    finally:
        progress.close()
    return _conclude(options, out, facts)


def _conclude(options: Namespace, out: Path, facts: Manifest) -> int:
    """Say where the file is and what is in it."""
    rows = sum(loss.rows for loss in facts.losses.values())
    print(f"kvprobe: {rows:,} rows in {out} ({out.stat().st_size:,} bytes)", file=sys.stderr)
    for note in facts.notes:
        print(f"kvprobe: note: {note}", file=sys.stderr)
    try:
        document, text = _report(options, out)
    except KvprobeError as error:
        raise KvprobeError(
            f"{out} is whole, but its report failed: {error.message}",
            error.hint or f"kvprobe report {out}",
            error.exit_code,
        ) from error
    except Exception as error:
        raise KvprobeError(
            f"{out} is whole, but its report failed: {type(error).__name__}: {error}",
            f"KVPROBE_DEBUG=1 kvprobe report {out} shows where",
            ExitCode.DEFECT,
        ) from error
    sys.stdout.write(text)
    from kvprobe import digest

    if options.fail_on is not None and (
        digest.worst_severity(document) >= digest.SEVERITIES.index(options.fail_on)
    ):
        return ExitCode.FINDINGS
    return ExitCode.OK if facts.complete else ExitCode.INCOMPLETE


def _report(options: Namespace, out: Path) -> tuple[dict[str, Any], str]:
    """The report document of the file just made, and how it is printed."""
    from kvprobe import document as report_document
    from kvprobe.capture.reader import open_capture
    from kvprobe.reports import json, text

    with open_capture(out) as capture:
        document = report_document.build(capture)
    if options.json:
        return document, json.render(document)
    page = page_options(sys.stdout)
    return document, text.render(document, source=str(out), summary=True, **page)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e7:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


COMMAND = Command(
    "capture", "record this machine's storage path for a while into one file", configure, run
)
