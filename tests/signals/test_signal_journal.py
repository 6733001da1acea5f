"""The journal feed, against a small ``journalctl`` of the test's own.

Machines that tests run on have no journal, or one that is not the tests' to write to. The entries
are in the form that journalctl 252 gave for a unit: text is a string, or a list of bytes where it
has colours or is no UTF-8; fields come in any order.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvprobe.clock import Moment
from kvprobe.errors import ExitCode, KvprobeError
from kvprobe.signals import FeedBatch
from kvprobe.signals.journal import OLD_LINES, JournalFeed
from kvprobe.signals.lines import MAX_LINE_BYTES
from tests.signals.log_lines import (
    LINES,
    OFFSET_NS,
    PREFIX,
    SECOND_NS,
    hit,
    names,
    requests,
    steady_clock,
)

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", "")
MONOTONIC_US = 30_011_772_700
REALTIME_US = MONOTONIC_US + OFFSET_NS // 1000
FAKE = """#!{python}
import os, sys, time
words, folder = sys.argv[1:], {folder!r}
with open(folder + "/calls", "a") as calls:
    calls.write(repr(words) + "\\n")
if "--follow" not in words:
    sys.stderr.write({stderr!r})
    sys.stdout.write({known!r})
    sys.exit({status})
open(folder + "/pid", "w").write(str(os.getpid()))
place = 0
while {follow}:
    with open(folder + "/journal", "rb") as journal:
        journal.seek(place)
        data = journal.read()
    place += len(data)
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
    time.sleep(0.005)
"""


class Journal:
    """A journal of one unit that the fake ``journalctl`` follows."""

    def __init__(self, folder: Path, path: str) -> None:
        self._folder = folder
        (folder / "journal").write_bytes(b"")
        self._path = path

    def install(
        self, known: str = "{}\n", status: int = 0, stderr: str = "", follow: bool = True
    ) -> None:
        program = self._folder / "journalctl"
        program.write_text(
            FAKE.format(
                python=sys.executable,
                folder=str(self._folder),
                known=known,
                status=status,
                stderr=stderr,
                follow=follow,
            )
        )
        program.chmod(0o755)

    def deafen(self) -> None:
        """From now on it does not heed SIGTERM."""
        program = self._folder / "journalctl"
        ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nimport os,"
        program.write_text(program.read_text().replace("import os,", ignore, 1))

    def systemctl(self, says: str) -> None:
        program = self._folder / "systemctl"
        program.write_text(f"#!/bin/sh\necho {says}\n")
        program.chmod(0o755)

    def write(self, *entries: dict[str, Any] | bytes) -> None:
        with (self._folder / "journal").open("ab") as file:
            for entry in entries:
                file.write(
                    entry if isinstance(entry, bytes) else json.dumps(entry).encode() + b"\n"
                )

    @property
    def calls(self) -> list[str]:
        return (self._folder / "calls").read_text().splitlines()

    @property
    def pid(self) -> int:
        return int((self._folder / "pid").read_text())


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    monkeypatch.setenv("PATH", str(tmp_path))
    made = Journal(tmp_path, str(tmp_path))
    made.install()
    return made


def entry(message: object, **more: object) -> dict[str, object]:
    return {
        "__CURSOR": "s=2d5b;i=5e9",
        "_BOOT_ID": BOOT,
        "MESSAGE": message,
        "__REALTIME_TIMESTAMP": str(REALTIME_US),
        "__MONOTONIC_TIMESTAMP": str(MONOTONIC_US),
    } | more


def text(name: str, prefix: str = "") -> str:
    return hit(name, prefix=prefix).decode().rstrip("\n")


@contextmanager
def followed() -> Iterator[JournalFeed]:
    feed = JournalFeed("vllm.service", LINES)
    try:
        yield feed
    finally:
        feed.close(steady_clock())


def until(feed: JournalFeed, enough: Callable[[FeedBatch], bool]) -> FeedBatch:
    """Poll until all that was heard is enough."""
    heard, deadline = FeedBatch(), time.monotonic() + 20
    while not enough(heard) and time.monotonic() < deadline:
        batch = feed.poll(steady_clock())
        heard = FeedBatch(
            [*heard.news, *batch.news],
            understood=heard.understood + batch.understood,
            ignored=heard.ignored + batch.ignored,
            lost=heard.lost + batch.lost,
        )
        time.sleep(0.002)
    assert enough(heard)
    return heard


def test_messages_of_a_unit(journal: Journal) -> None:
    coloured = b"\x1b[36m" + text("b").replace(" hit ", " \x1b[1mhit\x1b[0m ").encode()
    no_text = text("c").encode().replace(b" c ", b" c\xff ")
    with followed() as feed:
        journal.write(
            entry(text("a")),
            entry('quote " back\\slash Gr\u00fc\u00dfe\ttab'),
            entry(list(coloured)),
            entry(list(no_text)),
            entry([7, 8]),
            entry("Request d hit many offloaded tokens after 0"),
            {"MESSAGE": text("e"), **entry(text("e"))},
        )
        heard = until(feed, lambda heard: heard.understood >= 4)
        assert names(heard) == ["a", "b", "c\ufffd", "e"]
        assert (heard.understood, heard.ignored, heard.lost) == (4, 1, 0)
        at_ns = MONOTONIC_US * 1000
        assert {n.times["scheduled_ns"] for n in requests(heard)} == {Moment(at_ns, at_ns + 999)}
    assert feed.name == "journal:vllm.service"
    assert not feed.last_word


def test_what_is_asked_for(journal: Journal) -> None:
    with followed() as feed:
        journal.write(entry(text("a")))
        until(feed, lambda heard: heard.understood == 1)
        check, follow = journal.calls
        assert "'--unit=vllm.service'" in check and "'--lines=1'" in check
        for word in ("--follow", "--output=json", "--all", "--unit=vllm.service"):
            assert f"'{word}'" in follow
        assert f"'--lines={OLD_LINES}'" in follow
        assert all(f in follow for f in ("MESSAGE", "_BOOT_ID", "_SOURCE_MONOTONIC_TIMESTAMP"))


@pytest.mark.parametrize(
    ("prefix", "more", "moment"),
    [
        # The journal's own time, on CLOCK_MONOTONIC if it is of this boot.
        ("", {}, (MONOTONIC_US * 1000, 999)),
        ("", {"_SOURCE_MONOTONIC_TIMESTAMP": "1009"}, (1_009_000, 999)),
        ("", {"_BOOT_ID": "0" * 32, "__MONOTONIC_TIMESTAMP": "5"}, (MONOTONIC_US * 1000, 999)),
        # A stamp of the line that agrees with it, and one that says it came late.
        ("{now} ", {}, (MONOTONIC_US * 1000, 999)),
        ("{earlier} ", {}, ((REALTIME_US // 1_000_000 - 2) * SECOND_NS - OFFSET_NS, SECOND_NS - 1)),
    ],
)
def test_when_a_message_was_written(
    journal: Journal, prefix: str, more: dict[str, str], moment: tuple[int, int]
) -> None:
    stamps = {
        name: time.strftime("%m-%d %H:%M:%S", time.gmtime(REALTIME_US // 1_000_000 - back))
        for name, back in (("now", 0), ("earlier", 2))
    }
    with followed() as feed:
        journal.write(entry(text("a", prefix.format(**stamps)), **more))
        (news,) = requests(until(feed, lambda heard: heard.understood == 1))
    assert news.times["scheduled_ns"] == Moment(moment[0], moment[0] + moment[1])


BAD = [
    b'{"MESSAGE":"Request x hit 5 offloaded tokens after 0 GPU hit tokens"\n',
    b'{"MESSAGE":"Request x hit 5 offloaded tokens after 0 GPU hit tokens"}\n',
    b'"Request x hit 5 offloaded tokens after 0 GPU hit tokens"\n',
    b'{"MESSAGE":null,"x":"Request x hit 5 offloaded tokens after 0"}\n',
    b'{"MESSAGE":[256],"__REALTIME_TIMESTAMP":"1"}\n',
    b'{"MESSAGE":["a"],"__REALTIME_TIMESTAMP":"1"}\n',
    b"[" * 100_000 + b'"MESSAGE":[\n',
    b'\xff"MESSAGE":[1]\n',
]


def test_entries_that_are_none_are_counted(journal: Journal) -> None:
    with followed() as feed:
        journal.write(entry(text("a")), *BAD, entry(text("b", PREFIX), __MONOTONIC_TIMESTAMP="x"))
        journal.write(entry(text("c")))
        heard = until(feed, lambda heard: "c" in names(heard))
        assert names(heard) == ["a", "c"]
        assert (heard.understood, heard.ignored) == (2, len(BAD) + 1)


def test_the_exact_number_of_many(journal: Journal) -> None:
    with followed() as feed:
        for number in range(10_007):
            journal.write(*[entry(text(f"r{number}"))] * (number % 101 == 0), entry("other"))
        heard = until(feed, lambda heard: heard.understood >= 100)
        assert names(heard) == [f"r{number}" for number in range(0, 10_007, 101)]
        assert heard.ignored == 0


def test_closing_hears_the_last_and_ends_the_child(journal: Journal) -> None:
    feed = JournalFeed("vllm.service", LINES)
    journal.write(entry(text("a")))
    until(feed, lambda heard: heard.understood == 1)
    assert os.getpgid(journal.pid) == journal.pid != os.getpgid(0)
    journal.write(entry(text("b")))
    last = feed.close(steady_clock())
    assert (names(last), list(last.notes)) == (["b"], [])
    with pytest.raises(ProcessLookupError):
        os.kill(journal.pid, 0)


def test_a_child_that_ends_is_told(journal: Journal) -> None:
    journal.install(follow=False)
    feed = JournalFeed("vllm.service", LINES)
    deadline = time.monotonic() + 20
    while not feed._ended and time.monotonic() < deadline:
        assert not feed.poll(steady_clock()).news
        time.sleep(0.002)
    assert not feed.poll(steady_clock()).news
    assert list(feed.close(steady_clock()).notes) == [
        "journalctl ended before, and nothing was heard from then on"
    ]


def test_without_journalctl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KvprobeError) as caught:
        JournalFeed("vllm", LINES)
    assert caught.value.message == "no journalctl on this machine"
    assert caught.value.exit_code == ExitCode.UNSUPPORTED


def test_without_the_right_to_read(journal: Journal) -> None:
    said = "No journal files were opened due to insufficient permissions.\nmore\n"
    journal.install(known="", status=1, stderr=said)
    with pytest.raises(KvprobeError) as caught:
        JournalFeed("vllm", LINES)
    assert caught.value.message == (
        "journalctl cannot read the journal: "
        "No journal files were opened due to insufficient permissions"
    )
    assert "systemd-journal" in caught.value.hint


@pytest.mark.parametrize(("says", "known"), [("not-found", False), ("loaded", True), (None, False)])
def test_a_unit_that_has_said_nothing(journal: Journal, says: str | None, known: bool) -> None:
    journal.install(known="")
    if says is not None:
        journal.systemctl(says)
    if known:
        JournalFeed("vllm", LINES).close(steady_clock())
        return
    with pytest.raises(KvprobeError) as caught:
        JournalFeed("vllm", LINES)
    assert caught.value.message == "nothing is known of a unit vllm"
    assert "systemctl list-units" in caught.value.hint


def test_an_entry_that_is_too_long_is_counted(journal: Journal) -> None:
    with followed() as feed:
        journal.write(entry(text("a") + "x" * MAX_LINE_BYTES), entry(text("b")))
        heard = until(feed, lambda heard: heard.understood == 1)
        assert (names(heard), heard.ignored, heard.lost) == (["b"], 0, 1)


def test_a_child_that_does_not_heed_is_killed(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvprobe.signals.journal._LAST_SECONDS", 0.3)
    journal.deafen()
    feed = JournalFeed("vllm.service", LINES)
    journal.write(entry(text("a")))
    until(feed, lambda heard: heard.understood == 1)
    feed.close(steady_clock())
    assert feed._process.poll() == -signal.SIGKILL
