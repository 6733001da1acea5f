"""What a person sees while a capture runs: a bar on a terminal, lines in a log."""

import contextlib
import io
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TextIO

import pytest

from kvprobe.capture.manifest import OwnCost
from kvprobe.commands._progress import Bar, Lines, status_line
from kvprobe.model import Loss
from tests.capture.fake_source import START_NS, manifest

FACTS = replace(
    manifest(),
    losses={"block": Loss(12_347, 13, 0), "ops": Loss(211, 4, 0), "host": Loss(0, 0, 0)},
    cost=OwnCost(agent_cpu_ns=31_000_000, wall_ns=1_000_000_000),
)


def test_one_line_says_rows_losses_and_own_cost() -> None:
    line = status_line(FACTS)
    assert line == "block 12,347  ops 211  lost 17  own CPU 3.1 % of a core"
    thinned = replace(FACTS, losses={"block": Loss(1, 0, 1009)}, cost=OwnCost())
    assert status_line(thinned) == "block 1  lost 0  thinned 1,009"
    assert status_line(replace(FACTS, losses={})).startswith("no rows yet")


def test_lines_come_every_few_seconds() -> None:
    stream = io.StringIO()
    lines = Lines(60.0, stream)
    for second in range(13):
        lines.recording(replace(FACTS, end_ns=START_NS + second * 1_000_000_000))
    lines.packing(0, 12_558)
    lines.packing(12_558, 12_558)
    lines.close()
    found = stream.getvalue().splitlines()
    assert [re.findall(r"recording: (\d+) of 60 s", line) for line in found] == [
        ["0"], ["5"], ["10"], [],
    ]  # fmt: skip
    assert found[-1] == "kvprobe: packing 12,558 rows"


@pytest.fixture
def terminal() -> Iterator[tuple[int, TextIO]]:
    """A terminal: what was written to it can be read from the descriptor."""
    ours, theirs = os.openpty()
    try:
        with os.fdopen(theirs, "w", encoding="utf-8") as stream:
            yield ours, stream
    finally:
        os.close(ours)


def written(descriptor: int) -> str:
    """All that a terminal was sent, without its escapes; nobody has it open any more."""
    parts = []
    with contextlib.suppress(OSError):
        while part := os.read(descriptor, 1 << 16):
            parts.append(part)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(parts).decode())


@pytest.mark.parametrize("seconds", [60.0, None])
def test_a_bar_on_a_terminal(
    terminal: tuple[int, TextIO], seconds: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    ours, stream = terminal
    bar = Bar(seconds, stream)
    bar.recording(replace(FACTS, end_ns=START_NS + 7_000_000_000))
    bar.packing(12_558, 12_558)
    bar.close()
    stream.close()
    seen = written(ours)
    assert ("recording 7/60 s" if seconds else "recording 7 s") in seen
    assert "block 12,347" in seen and "lost 17" in seen
    assert "packing" in seen and "12,558 of 12,558 rows" in seen
