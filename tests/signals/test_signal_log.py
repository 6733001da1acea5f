"""The log feed: what is found in a log, however it is written, wrapped, coloured and rotated."""

from __future__ import annotations

import io
import json
import logging
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.logging import RichHandler

from kvprobe.adapter import LogLine
from kvprobe.errors import KvprobeError
from kvprobe.signals import FeedBatch, log
from kvprobe.signals.lines import MAX_LINE_BYTES
from kvprobe.signals.log import LogFeed
from kvprobe.signals.messages import MessageReader, plain
from tests.signals.log_lines import (
    HIT,
    LINES,
    PREFIX,
    hit,
    names,
    read_log,
    requests,
    steady_clock,
)

OTHER = b"(APIServer pid=1) INFO 12-01 17:20:23 [api_server.py:347] 127.0.0.1 POST 200 OK\n"
ESC = b"\x1b"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.log"


def test_messages_are_found_and_others_are_not_counted(path: Path) -> None:
    data = OTHER * 3 + hit("a") + OTHER + hit("b", 1009) + OTHER
    batch = read_log(path, data)
    assert [(news.id, news.tokens) for news in requests(batch)] == [
        ("a", {"offload_hit_tokens": 896}),
        ("b", {"offload_hit_tokens": 1009}),
    ]
    assert (batch.understood, batch.ignored, batch.lost, batch.notes) == (2, 0, 0, [])


def test_a_mark_without_its_message_is_counted(path: Path) -> None:
    torn = PREFIX.encode() + b"Request a hit many offloaded tokens after 0 GPU hit tokens\n"
    batch = read_log(path, torn + OTHER + hit("b"))
    assert names(batch) == ["b"]
    assert (batch.understood, batch.ignored) == (1, 1)


def test_what_says_nothing_is_understood_all_the_same(path: Path) -> None:
    """A request's arrival without a time: the line was read, there is no news in it."""
    batch = read_log(path, b"Received request a: params\n" + OTHER)
    assert (batch.news, batch.understood, batch.ignored) == ([], 1, 0)


@pytest.mark.parametrize(
    "error", [KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError]
)
def test_a_reader_that_fails_is_counted(path: Path, error: type[Exception]) -> None:
    def fail(match: re.Match[str], when: object) -> None:
        raise error

    batch = read_log(path, hit("a") + OTHER, (LogLine("fails", HIT.mark, HIT.pattern, fail),))
    assert (batch.news, batch.understood, batch.ignored) == ([], 0, 1)


def test_a_kind_of_line_needs_a_mark() -> None:
    with pytest.raises(ValueError, match="careless"):
        MessageReader([LogLine("careless", "", HIT.pattern, HIT.read)])


COLOURED = {
    "around": ESC + b"[32m%s" + ESC + b"[0m\n",
    "hyperlink": ESC + b"]8;;file:///srv/x.py" + ESC + b"\\%s" + ESC + b"]8;;" + ESC + b"\\\n",
    "hyperlink, bell": ESC + b"]8;;http://h/\x07%s" + ESC + b"]8;;\x07\n",
    "title": ESC + b"]0;vllm\x07%s\n",
    "character set": ESC + b"(B%s" + ESC + b"[K\n",
}


@pytest.mark.parametrize("how", COLOURED)
def test_colours_do_not_matter(path: Path, how: str) -> None:
    batch = read_log(path, COLOURED[how] % hit("a").rstrip(b"\n") + OTHER)
    assert [(n.id, n.tokens["offload_hit_tokens"]) for n in requests(batch)] == [("a", 896)]
    assert (batch.understood, batch.ignored) == (1, 0)


def test_a_mark_broken_by_colours_is_found(path: Path) -> None:
    """What a console's highlighter makes of it: every word of its own colour."""
    words = hit("a").rstrip(b"\n").split(b" ")
    line = b" ".join(
        ESC + b"[1;3%dm%s" % (i % 8, word) + ESC + b"[0m" for i, word in enumerate(words)
    )
    assert HIT.mark.encode() not in line
    batch = read_log(path, line + b"\n")
    assert [(n.id, n.tokens["offload_hit_tokens"]) for n in requests(batch)] == [("a", 896)]


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        (b"a\x1b[0mb", b"ab"),
        (b"a\x1b[38;2;1;2;3mb", b"ab"),
        (b"a\x1b", b"a"),
        (b"a\x1b[", b"a["),
        (b"a\x1b[12\n", b"a[12\n"),
        (b"a\x1b]8;;never ended\nb", b"a8;;never ended\nb"),
        (b"a\x1bPq..\x1b\\b", b"ab"),
        (b"a\x1b(Bb\x1b=c\x1b7d", b"abcd"),
        ("Gr\u00fc\u00dfe \u2588".encode(), "Gr\u00fc\u00dfe \u2588".encode()),
        (b'{"log":"a\\u001b[31mb"}', b'{"log":"ab"}'),
        (b"a\r\nb\rc\n", b"a\nb\nc\n"),
    ],
)
def test_escape_sequences_go_and_nothing_else(text: bytes, rest: bytes) -> None:
    assert plain(text) == rest


@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "(EngineCore_DP0 pid=4) ",
        "2026-12-01T17:20:23.123456789Z stdout F " + PREFIX,
        "vllm-0  | " + PREFIX,
        "[rank0] \U0001f680 " + PREFIX,
    ],
)
def test_prefixes_do_not_matter(path: Path, prefix: str) -> None:
    batch = read_log(path, hit("a", 7, prefix) + OTHER)
    assert [(n.id, n.tokens["offload_hit_tokens"]) for n in requests(batch)] == [("a", 7)]


def test_lines_that_docker_keeps_as_json(path: Path) -> None:
    quoted = LogLine("quoted", 'says "go"', re.compile(r'(\S+) says "go"'), lambda m, when: None)
    text = "\x1b[36m" + hit("a").decode()
    lines = [
        json.dumps({"log": text, "stream": "stderr", "time": "2026-12-01T17:20:23.5Z"}),
        json.dumps({"log": 'engine says "go"\n', "stream": "stdout", "time": "never"}),
        '{"log":"Request c hit 5 offloaded tokens after 0 GPU hit tokens", broken',
        json.dumps({"log": {"Request d hit 5 offloaded tokens after 0 GPU hit tokens": 1}}),
    ]
    batch = read_log(path, "\n".join(lines).encode() + b"\n", (*LINES, quoted))
    assert names(batch) == ["a", "c", "d"]
    assert (batch.understood, batch.ignored) == (4, 0)


def test_interleaved_writers(path: Path) -> None:
    """Two messages on a line, and one torn by another."""
    both = hit("a").rstrip(b"\n") + hit("b")
    inside = hit("c")
    torn = inside[:-40] + hit("d").rstrip(b"\n") + inside[-40:]
    batch = read_log(path, both + b"\n" + torn + OTHER)
    assert names(batch) == ["a", "b", "d"]
    assert batch.understood == 3


def test_no_message_is_read_twice(path: Path) -> None:
    general = LogLine("general", "Request ", re.compile(r"Request (\S+) hit (\d+)"), HIT.read)
    assert names(read_log(path, hit("a") + hit("b"), (HIT, general))) == ["a", "b"]
    assert names(read_log(path, hit("a") + hit("b"), (general, HIT))) == ["a", "b"]


# ---------------------------------------------------------------- wrapped lines

TEXT = "Request cmpl-a-0-bb3b4d3f hit 896 offloaded tokens after 0 GPU hit tokens"


def rich_log(width: int, colours: bool) -> bytes:
    """As rich's own handler writes it."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=colours, legacy_windows=False)
    record = logging.LogRecord("x", logging.INFO, "/srv/scheduler.py", 945, TEXT, (), None)
    record.created = 1_796_145_623.5
    RichHandler(console=console, highlighter=None).emit(record)
    return out.getvalue().encode()


@pytest.mark.parametrize("colours", [False, True])
@pytest.mark.parametrize("width", [72, 80, 81, 90, 100, 120, 200])
def test_what_a_rich_console_wrapped_is_put_together(path: Path, width: int, colours: bool) -> None:
    lines = rich_log(width, colours)
    assert (lines.count(b"\n") > 1) == (width < 110)
    batch = read_log(path, lines + OTHER + lines)
    assert [news.id for news in requests(batch)] == ["cmpl-a-0-bb3b4d3f"] * 2
    assert (batch.understood, batch.ignored) == (2, 0)
    assert all(news.times for news in requests(batch))


def test_words_wrapped_without_indentation(path: Path) -> None:
    out = io.StringIO()
    Console(file=out, width=60).print(PREFIX + TEXT, markup=False)
    assert out.getvalue().count("\n") == 3
    batch = read_log(path, out.getvalue().encode() + OTHER)
    assert names(batch) == ["cmpl-a-0-bb3b4d3f"]
    assert (batch.understood, batch.ignored) == (1, 0)


@pytest.mark.parametrize("cut", range(1, len(TEXT)))
def test_lines_cut_anywhere_give_the_message_or_nothing(path: Path, cut: int) -> None:
    """Where the mark is cut there is nothing to go by."""
    line = (PREFIX + TEXT).encode()
    at = len(PREFIX) + cut
    batch = read_log(path, line[:at] + b"\n" + line[at:] + b"\n" + OTHER)
    mark = TEXT.index(HIT.mark)
    seen = not mark < cut < mark + len(HIT.mark)
    expected = [("cmpl-a-0-bb3b4d3f", {"offload_hit_tokens": 896})] if seen else []
    assert [(news.id, news.tokens) for news in requests(batch)] == expected


def test_a_number_that_may_go_on_below_is_not_believed(path: Path) -> None:
    line = b"[2026-12-01 17:20:23] prefetch req=a loaded=29"
    cut = read_log(path, line + b"\n44\n" + OTHER)
    assert (names(cut), cut.understood, cut.ignored) == ([], 0, 1)
    whole = read_log(path, line + b"\n[2026-12-01 17:20:24] 44\n" + OTHER)
    assert (names(whole), whole.understood, whole.ignored) == (["a"], 1, 0)


def test_a_line_with_a_stamp_is_no_continuation(path: Path) -> None:
    half = PREFIX.encode() + b"Request a hit 5 offloaded tokens after 0\n"
    rest = PREFIX.encode() + b"GPU hit tokens\n"
    batch = read_log(path, half + rest)
    assert (batch.understood, batch.ignored) == (0, 1)


def test_a_wrapped_message_that_comes_in_pieces(path: Path) -> None:
    """Every byte in a poll of its own."""
    feed, clock = LogFeed(str(path), LINES), steady_clock()
    data = rich_log(80, False) + OTHER + hit("b") + rich_log(80, True)
    batches = []
    with path.open("wb", buffering=0) as file:
        for place in range(len(data)):
            file.write(data[place : place + 1])
            batches.append(feed.poll(clock))
    batches.append(feed.close(clock))
    assert names(*batches) == ["cmpl-a-0-bb3b4d3f", "b", "cmpl-a-0-bb3b4d3f"]
    assert sum(batch.understood for batch in batches) == 3
    assert sum(batch.ignored for batch in batches) == 0


def test_a_message_wrapped_without_indentation_that_comes_line_by_line(path: Path) -> None:
    feed, clock = LogFeed(str(path), LINES), steady_clock()
    parts = (PREFIX.encode() + b"Request a hit 5 offloaded tokens after 0", b"GPU hit", b"tokens")
    batches: list[FeedBatch] = []
    with path.open("wb", buffering=0) as file:
        for part in parts:
            assert not any(batch.understood or batch.ignored for batch in batches)
            file.write(part.rstrip() + b"\n")
            batches.append(feed.poll(clock))
    batches.append(feed.close(clock))
    assert names(*batches) == ["a"]
    assert sum(batch.ignored for batch in batches) == 0


# ---------------------------------------------------------------- lines that are torn, long, ended


def test_a_torn_last_line_waits_for_its_end(path: Path) -> None:
    feed, clock = LogFeed(str(path), LINES), steady_clock()
    data = hit("a")
    path.write_bytes(data[:50])
    assert not feed.poll(clock).news
    with path.open("ab") as file:
        file.write(data[50:-1])
    assert not feed.poll(clock).news
    with path.open("ab") as file:
        file.write(b"\n")
    assert names(feed.poll(clock)) == ["a"]
    with path.open("ab") as file:
        file.write(hit("b")[:-1])
    assert not feed.poll(clock).news
    assert names(feed.close(clock)) == ["b"]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_ends_of_lines(path: Path, end: bytes) -> None:
    lines = [hit(name).rstrip(b"\n") + end for name in "abc"]
    assert names(read_log(path, b"".join(lines))) == ["a", "b", "c"]


def test_a_progress_bar_does_not_swallow_a_message(path: Path) -> None:
    bar = b"".join(b"\rLoading: %3d%%" % (i % 101) for i in range(MAX_LINE_BYTES // 10))
    assert len(bar) > MAX_LINE_BYTES
    batch = read_log(path, bar + b"\r" + hit("a") + bar + b"\n" + hit("b"))
    assert names(batch) == ["a", "b"]
    assert batch.lost == 0


@pytest.mark.parametrize("size", [MAX_LINE_BYTES, MAX_LINE_BYTES + 1, 10 << 20])
def test_lines_that_are_too_long_are_skipped_and_counted(path: Path, size: int) -> None:
    message = hit("in it").rstrip(b"\n")
    long = message + b"x" * (size - len(message)) + b"\n"
    fits = size <= MAX_LINE_BYTES
    batch = read_log(path, hit("a") + long + hit("b"))
    assert names(batch) == ["a", "b"]
    assert batch.lost == (not fits)
    assert batch.ignored == fits  # "in it" is no id


def test_a_line_that_never_ends(path: Path) -> None:
    batch = read_log(path, hit("a") + b"y" * (10 << 20))
    assert (names(batch), batch.lost) == (["a"], 1)


def test_bytes_that_are_no_text(path: Path) -> None:
    junk = bytes(range(256)).replace(b"\n", b"").replace(b"\r", b"")
    batch = read_log(
        path, junk + hit("a") + hit("b").replace(b" b ", b" b\xff ") + junk * 100 + b"\n" + hit("c")
    )
    assert names(batch) == ["a", "b\ufffd", "c"]


def test_nul_bytes_are_dropped(path: Path) -> None:
    line = hit("a")
    batch = read_log(path, b"\0" * 4096 + line[:90] + b"\0\0" + line[90:] + b"\0" * 5000)
    assert names(batch) == ["a"]


@given(
    st.lists(
        st.one_of(
            st.integers(0, 50).map(lambda n: hit(f"r{n}")),
            st.just(OTHER),
            st.binary(max_size=40).map(lambda b: b.replace(b"\x1b", b"") + b"\n" + OTHER),
        ),
        max_size=30,
    ),
    st.lists(st.integers(1, 400), min_size=1, max_size=40),
)
def test_it_does_not_matter_how_a_log_arrives(parts: list[bytes], sizes: list[int]) -> None:
    path = Path(f"/tmp/kvprobe-test-log-{os.getpid()}")
    data = b"".join(parts)
    expected = [part.split(b" ")[7].decode() for part in parts if part.startswith(b"(EngineCore")]
    clock = steady_clock()
    try:
        path.write_bytes(b"")
        feed = LogFeed(str(path), LINES)
        batches, at = [], 0
        with path.open("wb", buffering=0) as file:
            for size in sizes:
                file.write(data[at : at + size])
                at += size
                batches.append(feed.poll(clock))
            file.write(data[at:])
        batches.append(feed.close(clock))
        assert names(*batches) == expected
        assert sum(batch.ignored for batch in batches) == 0
    finally:
        path.unlink()


# ---------------------------------------------------------------- the file


def test_a_log_that_comes_later(path: Path) -> None:
    feed, clock = LogFeed(str(path), LINES), steady_clock()
    assert not feed.poll(clock).news
    path.write_bytes(hit("a"))
    assert names(feed.poll(clock)) == ["a"]
    feed.close(clock)


def test_rotation_by_rename(path: Path) -> None:
    feed, clock = LogFeed(str(path), LINES), steady_clock()
    path.write_bytes(hit("a"))
    batches = [feed.poll(clock)]
    with path.open("ab") as file:
        file.write(hit("b"))
        path.rename(path.with_suffix(".1"))
        path.write_bytes(b"")
        batches.append(feed.poll(clock))
        file.write(hit("c"))  # by an engine that was not told
        file.flush()
        batches.append(feed.poll(clock))
        file.write(hit("d"))
    path.write_bytes(hit("e"))
    batches.append(feed.poll(clock))
    batches.append(feed.close(clock))
    assert names(*batches) == ["a", "b", "c", "d", "e"]


def test_copytruncate(path: Path) -> None:
    feed, clock = LogFeed(str(path), LINES), steady_clock()
    path.write_bytes(hit("a") + hit("b"))
    batches = [feed.poll(clock)]
    path.write_bytes(hit("c"))
    batches.append(feed.poll(clock))
    batches.append(feed.close(clock))
    assert names(*batches) == ["a", "b", "c"]


def test_a_writer_that_does_not_append_leaves_a_hole(path: Path) -> None:
    """After copytruncate it writes on where it was: behind gigabytes that nobody wrote."""
    feed, clock = LogFeed(str(path), LINES), steady_clock()
    path.write_bytes(hit("a"))
    assert names(feed.poll(clock)) == ["a"]
    path.write_bytes(b"")
    assert not feed.poll(clock).news
    with path.open("r+b") as file:
        file.seek(20 << 30)
        file.write(hit("b"))
    batch = feed.poll(clock)
    last = feed.close(clock)
    assert names(batch, last) == ["b"]
    assert last.notes == []


def test_of_an_old_log_only_the_end_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "MOST_BEHIND_BYTES", 1 << 20)
    lines = [hit(f"r{number:07d}") for number in range(30_011)]
    batch = read_log(path, b"".join(lines))
    whole = (1 << 20) // len(lines[0])
    assert names(batch) == [f"r{number:07d}" for number in range(30_011)][-whole:]
    size = sum(map(len, lines)) - (1 << 20)
    assert list(batch.notes) == [
        f"{size >> 20} MiB of the log were not read: older than its last 1 MiB"
    ]


def test_a_line_at_the_border_of_what_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = hit("r0")
    monkeypatch.setattr(log, "MOST_BEHIND_BYTES", 100 * len(line))
    assert len(names(read_log(path, line * 203))) == 100
    monkeypatch.setattr(log, "MOST_BEHIND_BYTES", 100 * len(line) - 1)
    assert len(names(read_log(path, line * 203))) == 99


def test_what_cannot_be_a_log(tmp_path: Path) -> None:
    with pytest.raises(KvprobeError) as caught:
        LogFeed(str(tmp_path), LINES)
    assert caught.value.message == f"{tmp_path} is not a file"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(KvprobeError, match="is not a file"):
        LogFeed(str(pipe), LINES)
    with pytest.raises(KvprobeError, match="cannot read"):
        LogFeed(str(tmp_path / ("n" * 300)), LINES)


def test_a_log_that_becomes_something_else_does_not_block(path: Path) -> None:
    feed, clock = LogFeed(str(path), LINES), steady_clock()
    os.mkfifo(path)
    assert not feed.poll(clock).news
    path.unlink()
    path.mkdir()
    assert not feed.poll(clock).news
    assert not feed.close(clock).news
