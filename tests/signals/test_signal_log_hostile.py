"""A million lines of mixed, torn and hostile log: an exact count, bounded memory, no traceback."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from kvprobe.signals import FeedBatch
from kvprobe.signals.log import LogFeed
from tests.signals.log_lines import LINES, PREFIX, hit, names, steady_clock

LINES_WRITTEN = 1_000_003
GOOD = 104_729
"""Both are prime."""
MOST_MEMORY_BYTES = 96 << 20
"""Of it 40 MiB are the test's own: what waits to be written, and the ids."""
ESC = b"\x1b"
MESSAGE = hit("r%d")
NOTHING = [
    b'(APIServer pid=1) INFO:     127.0.0.1:39 - "POST /v1/completions HTTP/1.1" 200 OK\n',
    b"(EngineCore pid=2) DEBUG 12-01 17:20:23 [kv_cache_manager.py:211] Allocated 7 blocks\n",
    b"[2026-12-01 17:26:18,990] LMCache INFO: torch_dev=Stub (_device_detect.py:311)\n",
    b"I1201 17:38:21.862865  2771 client_metric.cpp:102] Client metrics enabled\n",
    b"\n",
    b"Traceback (most recent call last):\n",
    b"    raise RuntimeError(x)\n",
    ESC + b"[32mINFO" + ESC + b"[0m 12-01 17:20:23 ready " + ESC + b"]8;;http://h" + ESC + b"\\\n",
    "\u2588\u2588\u2584 Gr\u00fc\u00dfe \U0001f680\n".encode(),
    b"\xff\xfe\x00\x01 no text \xc3\x28 \xed\xa0\x80\n",
    b"\0\0\0\0\n",
    b"\r\n",
    b'{"log":"INFO 12-01 17:20:23 fine\\n","time":"2026-12-01T17:20:23Z"}\n',
]
"""Lines without a mark: neither understood nor ignored."""
NEARLY = [
    PREFIX.encode() + b"Request x hit many offloaded tokens after 0 GPU hit tokens\n",
    PREFIX.encode() + b"Request  hit 5 offloaded tokens after 0 GPU hit tokens\n",
    PREFIX.encode()
    + b"Request x hit "
    + b"9" * 5000
    + b" offloaded tokens after 0 GPU hit tokens\n",
    PREFIX.encode() + b"Request x hit 5 offloaded tokens after" + ESC + b" 0 GPU hit tok\n",
    b'{"log":"Request x hit 7 offloaded tokens after ","time":7\n',
]
"""Lines with a mark that are no message: ignored."""
FORMS = [
    lambda line: line,
    lambda line: line[:-1] + b"\r\n",
    lambda line: ESC + b"[36m" + line.replace(b" hit ", b" " + ESC + b"[1mhit" + ESC + b"[0m ", 1),
    lambda line: line.replace(b"offloaded ", b"off" + ESC + b"[4mloaded" + ESC + b"[0m ", 1),
    lambda line: b"2026-12-01T17:20:23.123456789Z stdout F " + line,
    lambda line: b'{"log":"' + line[:-1] + b'\\n","time":"2026-12-01T17:20:23.5Z"}\n',
    lambda line: b"\0\0" + line[:40] + b"\0" + line[40:],
    lambda line: b"\xff\xfe " + line,
    lambda line: b"0%\r50%\r" + line,
    lambda line: b"torn (EngineCore pid=2) DEBUG 12-01 17:20:22 [x.py:1] Requ" + line,
]
"""Ways in which a message may be written."""
LONG_EVERY = 50_021


def hostile_log(generator: random.Random) -> Iterator[tuple[bytes, int, int, int]]:
    """Pieces of the log, with how many messages, lines that are nearly one, and too long ones."""
    kinds = [1] * GOOD + [2] * 50_021
    kinds += [0] * (LINES_WRITTEN - len(kinds))
    generator.shuffle(kinds)
    for number, kind in enumerate(kinds):
        if number % LONG_EVERY == LONG_EVERY - 1:
            yield b"z" * (10 << 20) + MESSAGE.replace(b"%d", b"long"), 0, 0, 1
        if kind == 1:
            yield generator.choice(FORMS)(MESSAGE.replace(b"%d", b"%d" % number)), 1, 0, 0
        elif kind == 2:
            yield generator.choice(NEARLY), 0, 1, 0
        else:
            yield generator.choice(NOTHING), 0, 0, 0


def peak_bytes() -> int:
    """The most memory that this process has had since ``forget_peak``."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def test_a_million_hostile_lines(tmp_path: Path) -> None:
    feed, clock = LogFeed(str(tmp_path / "engine.log"), LINES), steady_clock()
    generator = random.Random(1_000_003)
    written, heard = [0, 0, 0], [0, 0, 0]
    ids: set[str] = set()
    waiting = bytearray()

    def take(batch: FeedBatch) -> None:
        for place, count in enumerate((batch.understood, batch.ignored, batch.lost)):
            heard[place] += count
        ids.update(names(batch))

    forget_peak()
    before_bytes = peak_bytes()
    with (tmp_path / "engine.log").open("ab", buffering=0) as file:
        for piece, *counts in hostile_log(generator):
            written = [a + b for a, b in zip(written, counts, strict=True)]
            waiting += piece
            if len(waiting) >= 6 << 20:
                cut = generator.randrange(len(waiting))  # torn anywhere
                file.write(waiting[:cut])
                del waiting[:cut]
                take(feed.poll(clock))
        file.write(waiting)
    last = feed.close(clock)
    take(last)
    assert written[0] == GOOD
    assert written[2] == LINES_WRITTEN // LONG_EVERY
    assert heard == written
    assert len(ids) == GOOD
    assert not last.notes
    assert peak_bytes() - before_bytes < MOST_MEMORY_BYTES


def test_the_peak_of_memory_is_seen() -> None:
    forget_peak()
    before_bytes = peak_bytes()
    assert len(bytes(range(256)) * (MOST_MEMORY_BYTES // 256)) == MOST_MEMORY_BYTES
    assert peak_bytes() - before_bytes > MOST_MEMORY_BYTES * 0.9
