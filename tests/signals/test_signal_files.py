"""Files of JSON lines under new names: each line once, in spite of rotation, numbers and junk."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.adapter import JsonFiles, News, RequestNews
from kvprobe.clock import Moment
from kvprobe.errors import KvprobeError
from kvprobe.signals import FeedBatch, files
from kvprobe.signals.files import LOOK_NS, NEWEST, WHOLE_LOOK_NS, FilesFeed
from kvprobe.signals.lines import MAX_LINE_BYTES
from tests.signals.log_lines import OFFSET_NS, SECOND_NS, names, requests, steady_clock


def read(said: Mapping[str, Any], moment: Callable[[int], Moment]) -> Sequence[News]:
    if "raise" in said:
        raise {e.__name__: e for e in ERRORS}[said["raise"]]
    return [RequestNews(said["id"], {"arrival_ns": moment(said["t"])}, keys=tuple(said["keys"]))]


ERRORS = (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError)
FILES = JsonFiles(re.compile(r"lookup_\d+\.jsonl"), read)


def line(name: str) -> bytes:
    return json.dumps({"id": name, "t": OFFSET_NS + 7, "keys": ["k"]}).encode() + b"\n"


class Folder:
    """A feed of a folder with a clock that the test sets."""

    def __init__(self, path: Path, kinds: Sequence[JsonFiles] = (FILES,)) -> None:
        self.path, self.now_ns, self.clock = path, SECOND_NS, steady_clock()
        self.feed = FilesFeed(str(path), kinds, now=lambda: self.now_ns)

    def poll(self, after_ns: int = LOOK_NS) -> FeedBatch:
        self.now_ns += after_ns
        return self.feed.poll(self.clock)

    def close(self) -> FeedBatch:
        return self.feed.close(self.clock)

    def add(self, name: str, data: bytes, age_s: int = 0) -> None:
        with (self.path / name).open("ab") as file:
            file.write(data)
        if age_s:
            then = os.stat(self.path).st_mtime - age_s
            os.utime(self.path / name, (then, then))

    @property
    def open_files(self) -> int:
        links = (os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd"))
        return sum(link.startswith(str(self.path.resolve()) + "/") for link in links)


def test_lines_of_new_and_growing_files(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert (folder.feed.name, folder.feed.last_word) == (f"files:{tmp_path}", True)
    assert not folder.poll().news
    folder.add("lookup_1.jsonl", line("a"))
    folder.add("other.jsonl", line("never"))
    folder.add("lookup_1.jsonl.gz", line("never"))
    (tmp_path / "lookup_9.jsonl").mkdir()
    (news,) = requests(folder.poll())
    assert news == RequestNews("a", {"arrival_ns": Moment(7, 7)}, keys=("k",))
    folder.add("lookup_1.jsonl", line("b") + line("c")[:20])
    folder.add("lookup_2.jsonl", line("d"))
    assert names(folder.poll(0)) == ["b"]
    folder.add("lookup_1.jsonl", line("c")[20:])
    assert sorted(names(folder.poll())) == ["c", "d"]
    folder.add("lookup_2.jsonl", line("e")[:-1])
    assert not folder.poll().news
    assert names(folder.close()) == ["e"]
    assert folder.open_files == 0


def test_what_cannot_be_read_is_counted(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    bad = [b"{", b"[1]", b"7", b"null", b"\xff\xfe", b"{}", b'{"id":1}', b"[" * 100_000]
    bad += [json.dumps({"raise": error.__name__}).encode() for error in ERRORS]
    folder.add("lookup_1.jsonl", b"\n".join(bad) + b"\n\n \r\n" + line("a"))
    folder.add("lookup_1.jsonl", b"x" * (MAX_LINE_BYTES + 1) + b"\n" + line("b"))
    batch = folder.poll()
    assert names(batch) == ["a", "b"]
    assert (batch.understood, batch.ignored, batch.lost) == (2, len(bad), 1)
    folder.close()


def test_a_reader_that_breaks_its_word_is_not_hidden(tmp_path: Path) -> None:
    def broken(said: Mapping[str, Any], moment: Callable[[int], Moment]) -> Sequence[News]:
        raise ZeroDivisionError

    folder = Folder(tmp_path, [JsonFiles(FILES.names, broken)])
    folder.add("lookup_1.jsonl", line("a"))
    with pytest.raises(ZeroDivisionError):
        folder.poll()
    folder.close()


def test_several_adapters_may_know_a_file(tmp_path: Path) -> None:
    other = JsonFiles(re.compile(r".*\.jsonl"), lambda said, moment: [RequestNews(said["rid"])])
    folder = Folder(tmp_path, [FILES, other])
    folder.add("lookup_1.jsonl", line("a") + b'{"rid":"b"}\n{"x":1}\n')
    batch = folder.poll()
    assert names(batch) == ["a", "b"]
    assert (batch.understood, batch.ignored) == (2, 1)
    folder.close()


def test_thousands_of_old_files_are_read_once_and_closed(tmp_path: Path) -> None:
    for number in range(1009):
        (tmp_path / f"lookup_{number}.jsonl").write_bytes(line(f"r{number}"))
    folder = Folder(tmp_path)
    batches, most_open = [], 0
    for _ in range(30):
        batches.append(folder.poll())
        most_open = max(most_open, folder.open_files)
    assert len(names(*batches)) == len(set(names(*batches))) == 1009
    assert most_open <= NEWEST + 1
    assert max(len(batch.news) for batch in batches) < 300
    assert not folder.close().news
    assert folder.open_files == 0


def test_an_old_file_that_grows_again(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for number in range(101):
        folder.add(f"lookup_{number}.jsonl", line(f"r{number}"), age_s=3600 - number)
    assert len(names(folder.poll())) == 101
    folder.add("lookup_7.jsonl", line("again") + line("torn")[:9])
    assert names(folder.poll(WHOLE_LOOK_NS)) == ["again"]
    assert not folder.poll(WHOLE_LOOK_NS).news
    folder.add("lookup_7.jsonl", line("torn")[9:])
    assert names(folder.poll(WHOLE_LOOK_NS)) == ["torn"]
    folder.add("lookup_3.jsonl", line("at the end"))
    folder.add("lookup_4.jsonl", line("no end")[:-1])
    assert sorted(names(folder.close())) == ["at the end", "no end"]


def test_of_an_old_folder_only_the_newest_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len(line("r00"))
    monkeypatch.setattr(files, "MOST_OLD_BYTES", 5 * size)
    for number in range(7):
        path = tmp_path / f"lookup_{number}.jsonl"
        path.write_bytes(line(f"r{number}0") + line(f"r{number}1"))
        os.utime(path, (1_000_000 + number, 1_000_000 + number))
    folder = Folder(tmp_path)
    assert names(folder.poll()) == ["r41", "r50", "r51", "r60", "r61"]
    folder.add("lookup_0.jsonl", line("new"))
    last = folder.close()
    assert names(last) == ["new"]
    assert last.notes == ["5 old files were not read, or only their ends"]


def test_files_that_go_are_read_to_their_end(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.add("lookup_1.jsonl", line("a"))
    assert names(folder.poll()) == ["a"]
    folder.add("lookup_1.jsonl", line("b") + line("c")[:-1])
    (tmp_path / "lookup_1.jsonl").unlink()
    assert names(folder.poll()) == ["b", "c"]
    assert folder.open_files == 0
    folder.add("lookup_1.jsonl", line("d"))
    assert names(folder.poll(), folder.close()) == ["d"]


def test_a_file_replaced_while_it_is_closed(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    for number in range(50):
        folder.add(f"lookup_{number}.jsonl", line(f"r{number}"), age_s=3600 - number)
    assert len(names(folder.poll())) == 50
    (tmp_path / "new").write_bytes(line("n1") + line("n2"))
    (tmp_path / "new").rename(tmp_path / "lookup_0.jsonl")
    assert names(folder.poll()) == ["n1", "n2"]
    folder.close()


def test_a_folder_that_comes_later(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "later")
    assert not folder.poll().news
    (tmp_path / "later").mkdir()
    folder.add("lookup_1.jsonl", line("a"))
    assert names(folder.poll()) == ["a"]
    folder.close()


def test_a_quiet_folder_is_not_looked_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folder(tmp_path)
    folder.add("lookup_1.jsonl", line("a"))
    os.utime(tmp_path, (1_000_000, 1_000_000))
    looks = 0
    scandir = os.scandir

    def counted(path: str) -> Any:
        nonlocal looks
        looks += 1
        return scandir(path)

    monkeypatch.setattr(os, "scandir", counted)
    assert names(*(folder.poll(LOOK_NS // 10) for _ in range(150))) == ["a"]
    assert looks == 1
    folder.poll(WHOLE_LOOK_NS)
    assert looks == 2
    folder.close()


def test_what_cannot_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(KvprobeError, match="is not a folder") as caught:
        FilesFeed(str(tmp_path / "file"), [FILES])
    assert caught.value.hint == f"for a log: log:{tmp_path / 'file'}"
    with pytest.raises(KvprobeError, match="no folder"):
        FilesFeed(str(tmp_path / "x" / "y"), [FILES])
    with pytest.raises(KvprobeError, match="cannot read"):
        FilesFeed(str(tmp_path / ("n" * 300)), [FILES])


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 60), st.booleans()), max_size=40),
    st.integers(1, 3),
)
def test_every_line_is_heard_once(writes: list[tuple[int, int, bool]], newest: int) -> None:
    """However many files grow by however many bytes between two polls, followed or left."""
    with tempfile.TemporaryDirectory() as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "NEWEST", newest)
        folder, waiting, batches = Folder(Path(path)), [b""] * 5, []
        for number, (place, size, polled) in enumerate(writes):
            waiting[place] += line(f"r{number}")
            folder.add(f"lookup_{place}.jsonl", waiting[place][:size])
            waiting[place] = waiting[place][size:]
            if polled:
                batches.append(folder.poll(WHOLE_LOOK_NS))
        for place, rest in enumerate(waiting):
            folder.add(f"lookup_{place}.jsonl", rest)
        batches.append(folder.close())
    assert sorted(names(*batches)) == sorted(f"r{number}" for number in range(len(writes)))
    assert sum(batch.ignored for batch in batches) == 0
