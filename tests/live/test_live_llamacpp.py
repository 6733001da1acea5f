"""llama.cpp saves and restores a slot a prompt; the client tells kvprobe of it in JSON lines."""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvprobe.correlator import Ledger
from kvprobe.model import Verdict
from kvprobe.schema import OpKind
from kvprobe.workload.scratch import Scratch
from tests.live.engine_capture import capturing, seen
from tests.live.engine_process import (
    EngineMissingError,
    EngineProcess,
    answers,
    free_ports,
    python_of,
)

LENGTHS = (523, 701, 907, 1103, 1301, 1499, 1699, 1901, 2099, 2297, 2503)
COMPUTED = 29
WORDS = 512
MILLISECOND_NS = 1_000_000
DRIVER = Path(__file__).parent / "drivers" / "llamacpp_server.py"


@dataclass
class Slots:
    """A server with one slot, and the events that its client writes."""

    port: int
    events: Path

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send and wait."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", path, json.dumps(body))
            answer = connection.getresponse()
            text = answer.read()
            assert answer.status == 200, text
            return json.loads(text)
        finally:
            connection.close()

    def compute(self, prompt: list[int]) -> Any:
        """Run the prompt, whose beginning may be in the slot, to its first token."""
        body = {"prompt": prompt, "n_predict": 1, "cache_prompt": True, "id_slot": 0}
        return self.post("/completion", body)

    def act(self, action: str, **body: str) -> Any:
        """Save, restore or erase the slot."""
        return self.post(f"/slots/0?action={action}", body)

    def tell(self, event: str, **more: Any) -> None:
        """Write one event."""
        with self.events.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **more}) + "\n")


def prompt(number: int) -> list[int]:
    source = random.Random(number)
    count = LENGTHS[number % len(LENGTHS)]
    return [source.randrange(3, WORDS) for _ in range(count)]


def key_of(words: list[int]) -> str:
    return hashlib.sha256(str(words).encode()).hexdigest()


def file_of(words: list[int]) -> str:
    """Slots are named by the client: a scheme that kvprobe knows has the key in the name."""
    return f"{key_of(words)}_tiny_0_1.bin"


@pytest.fixture(scope="module")
def slots(disk: Scratch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slots]:
    folder = tmp_path_factory.mktemp("kvprobe-llamacpp")
    root = Path(disk.root, "llamacpp")
    root.mkdir()
    (port,) = free_ports(1)
    try:
        words = [python_of("llamacpp"), str(DRIVER), str(folder / "tiny.gguf"), str(port)]
    except EngineMissingError as missing:
        pytest.skip(str(missing))
    with EngineProcess("llama.cpp", [*words, str(root)], folder / "server.log", {}) as server:
        server.wait_until(lambda: answers(f"http://127.0.0.1:{port}/health"), 60)
        yield Slots(port, folder / "events.jsonl")


def ask(slots: Slots, name: str, words: list[int], restore: bool) -> int:
    """One request in an empty slot, told as events; returns the bytes that llama.cpp restored."""
    slots.act("erase")
    restored, read = 0, 0
    slots.tell("arrival", id=name, t_ns=time.monotonic_ns(), prompt_tokens=len(words))
    slots.tell("scheduled", id=name, t_ns=time.monotonic_ns())
    if restore:
        slots.tell("keys", id=name, keys=[key_of(words)])
        said = slots.act("restore", filename=file_of(words))
        read, restored = said["n_read"], len(words) - 1
    # One more word than was stored, so that something is left to compute.
    said = slots.compute(words)
    first = time.monotonic_ns()
    start = first - round(said["timings"]["prompt_ms"] * MILLISECOND_NS)
    slots.tell(
        "prefill_start",
        id=name,
        t_ns=start,
        device_hit_tokens=0,
        storage_hit_tokens=restored,
        computed_tokens=said["timings"]["prompt_n"],
    )
    for event in ("prefill_end", "first_token", "finish"):
        slots.tell(event, id=name, t_ns=first)
    return int(read)


@pytest.fixture(scope="module")
def look(
    slots: Slots, disk: Scratch, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, int], Ledger]:
    """Bytes that llama.cpp says it restored for each request, and what kvprobe saw."""
    root = Path(disk.root, "llamacpp")
    for number in range(len(LENGTHS)):
        slots.act("erase")
        slots.compute(prompt(number))
        slots.act("save", filename=file_of(prompt(number)))
    out = tmp_path_factory.mktemp("kvprobe-llamacpp") / "look.kvcap"
    slots.tell("engine", name="llama.cpp", root=str(root), direct=False, prefill="cpu")
    told: dict[str, int] = {}
    with capturing(out, "--root", root, "--engine", "jsonl", "--signal", slots.events):
        for number in range(COMPUTED):
            ask(slots, f"c{number}", prompt(1000 + number), restore=False)
        for number in range(len(LENGTHS)):
            told[f"r{number}"] = ask(slots, f"r{number}", prompt(number), restore=True)
    return told, seen(out).ledger


def test_restored_bytes_are_llama_cpps(look: tuple[dict[str, int], Ledger]) -> None:
    """It opens a file twice and reads the head again: ranges count once, as in its own figure."""
    told, ledger = look
    ops = ledger.ops
    for number, account in enumerate(ledger.accounts):
        rows = ledger.ops_of(number)
        covered = np.zeros(told.get(account.id, 0), bool)
        for row in rows[ops["kind"][rows] < OpKind.WRITE].tolist():
            begin = int(ops["offset"][row])
            assert begin + int(ops["result"][row]) <= len(covered)
            covered[begin : begin + int(ops["result"][row])] = True
        assert covered.all()


def test_the_join_is_exact(look: tuple[dict[str, int], Ledger]) -> None:
    told, ledger = look
    restored = [a for a in ledger.accounts if a.restore is not None and a.restore.bytes]
    assert sorted(a.id for a in restored) == sorted(told)
    assert all(a.attribution["exact"] == pytest.approx(1) for a in restored)


def test_restoring_won(look: tuple[dict[str, int], Ledger]) -> None:
    """A slot is read in a few milliseconds, and computing it takes tens."""
    _, ledger = look
    verdicts = [a.verdict for a in ledger.accounts if a.restore is not None and a.restore.bytes]
    assert verdicts.count(Verdict.RESTORE_WON) > 0.8 * len(verdicts)
