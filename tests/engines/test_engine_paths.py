"""Every engine knows its own real paths, and no other engine's."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvprobe import engines
from kvprobe.adapter import KVPath

SAMPLES = Path(__file__).parents[1] / "data" / "engine_paths"
STATES = {"final": {}, "temporary": {"temporary": True}, "shared": {"shared": True}}
FOREIGN = [
    "",
    "/",
    ".bin",
    "/etc/passwd",
    "/srv/kv/fs/_srv_models_llama-tiny_d56cd50a5136/config.json",
    "/srv/kv/fs/.o_direct_probe_17.tmp",
    "/srv/models/pytorch_model.bin",
    "/tmp/a" * 60 + ".bin",
]


def samples(name: str) -> list[tuple[str, KVPath]]:
    rows = []
    for line in (SAMPLES / f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            path, key, state = line.rsplit(" ", 2)
            rows.append((path, KVPath(key, **STATES[state])))
    return rows


def file_engines() -> list[str]:
    return [name for name, engine in engines.engines().items() if engine.describes_files]


def test_there_are_engines_and_each_exports_its_own_name() -> None:
    found = engines.engines()
    assert {"vllm", "jsonl"} <= set(found)
    assert all(engine.name == stem and engine.summary for stem, engine in found.items())


@pytest.mark.parametrize("name", file_engines())
def test_real_paths_have_their_keys(name: str) -> None:
    rows = samples(name)
    assert len(rows) >= 3
    recognise = engines.engines()[name].recognise
    assert [recognise(path) for path, _ in rows] == [expected for _, expected in rows]
    assert not all(found.temporary for _, found in rows)


@pytest.mark.parametrize("name", file_engines())
def test_no_engine_claims_anothers_path(name: str) -> None:
    for path, expected in samples(name):
        claims = [n for n in file_engines() if engines.engines()[n].recognise(path)]
        assert claims == [name], path
        assert engines.owner(path) == (name, expected)
        assert engines.recognise(path) == expected
        assert engines.engines()["jsonl"].recognise(path) == expected


@pytest.mark.parametrize("path", FOREIGN)
def test_other_files_are_nobodys(path: str) -> None:
    assert engines.owner(path) is None
    assert engines.recognise(path) is None


def test_recognising_is_fast_enough_for_a_capture() -> None:
    start = "/srv/kv/m_0123456789ab_r0"
    paths = [
        f"{start}/{n:03x}/{n % 256:02x}_g0/{n:03x}{n % 256:02x}{n:059x}.bin" for n in range(4000)
    ]
    paths += [f"/srv/kv/other/file-{n}.bin" for n in range(1000)]
    uncached = cached = 1.0
    for _ in range(5):  # the best of five: the machine has other things to do
        engines.owner.cache_clear()
        begun = time.process_time()
        assert sum(engines.recognise(path) is not None for path in paths) == 4000
        uncached = min(uncached, time.process_time() - begun)
        begun = time.process_time()
        for path in paths:
            engines.recognise(path)
        cached = min(cached, time.process_time() - begun)
    assert uncached < len(paths) / 100_000, "fewer than 100,000 new paths a second"
    assert cached < len(paths) / 500_000, "fewer than 500,000 known paths a second"


def test_a_hostile_path_is_decided_quickly() -> None:
    path = "/" + "a_0123456789ab_r0/012/34_g0/" * 2000 + "01234" + "f" * 4000 + "g.bin"
    begun = time.process_time()
    assert engines.recognise(path) is None
    assert time.process_time() - begun < 0.5
