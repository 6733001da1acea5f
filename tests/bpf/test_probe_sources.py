"""Probes as sources: they compose, compile for both compilers, and say what they are."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from kvprobe import content, schema
from kvprobe.bpf import aggregates, catalog, core_object, roots
from kvprobe.bpf.compose import compose, files_of
from kvprobe.errors import KvprobeError

PROBES = sorted(catalog.available())
NEEDS_CLANG = pytest.mark.skipif(shutil.which("clang") is None, reason="clang is not installed")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A content folder of our own with a copy of the dialect and the probes."""
    copy = tmp_path / "content" / "probes"
    shutil.copytree(
        content.directory("probes"), copy, ignore=shutil.ignore_patterns("*.bpf.o", "*.py*")
    )
    monkeypatch.setenv(content.ENVIRONMENT, str(copy.parent))
    return copy


@NEEDS_CLANG
@pytest.mark.parametrize("name", PROBES)
def test_each_probe_compiles_alone_without_warnings(name: str, tmp_path: Path) -> None:
    source = compose(catalog.choose([name]), bcc=False)
    assert core_object.compile_to(tmp_path / "one.o", source).stat().st_size > 1000


@pytest.mark.parametrize("name", PROBES)
@pytest.mark.parametrize("bcc", [False, True])
def test_what_is_declared_is_found(name: str, bcc: bool) -> None:
    probe = catalog.available()[name]
    source = compose([probe], bcc=bcc)
    text = "".join(path.read_text() for path in files_of(probe))
    mine = [hook for hook in source.hooks if hook.probe == name]
    assert len({hook.name for hook in mine}) == sum(text.count(f"\n{kind}(") for kind in _HOOKS)
    assert len([m for m in source.maps if m.probe == name]) == sum(
        text.count(f"\n{kind}(") for kind in ("HASH", "ARRAY", "PER_CPU_ARRAY", "LRU_HASH", "RING")
    )
    assert f"lost_{probe.table}" in source.counters
    stems = {path.name.split(".")[0].split("_")[0] for path in files_of(probe)}
    assert all(item.name.startswith(tuple(stems)) for item in source.maps if item.probe == name)
    assert all(hook.name.startswith(name) for hook in mine)
    assert schema.c_struct(schema.TABLES[probe.table]) in source.text
    assert source.text.startswith("#define KV_BCC") == bcc


_HOOKS = (
    "RAW_HOOK",
    *(f"{what}_{end}" for what in ("SYSCALL", "FUNCTION", "LIBRARY") for end in ("ENTER", "EXIT")),
)


@pytest.mark.parametrize("name", PROBES)
def test_a_probe_says_what_is_hidden_where_an_event_is_missing(name: str) -> None:
    probe = catalog.available()[name]
    source = compose([probe], bcc=False)
    events = {hook.event for hook in source.hooks if hook.probe == name}
    symbols = {symbol for kind, symbol in source.constants if kind == "symbol"}
    substitutes = set(probe.instead.values())
    known = set(probe.hides) | set(probe.optional) | substitutes
    assert events <= known
    modules = {hook.module for hook in source.hooks if hook.module}
    assert set(probe.hides) <= events | symbols | modules | {probe.library}
    assert not probe.library or probe.library in probe.hides
    assert not probe.needs or probe.needs in probe.hides
    assert set(probe.optional) | set(probe.instead) | substitutes <= events
    assert probe.summary
    assert catalog.is_ring_size(probe.ring_bytes)


def test_a_probe_comes_with_those_that_it_uses() -> None:
    assert [probe.name for probe in catalog.choose(["nvme"])] == ["block", "nvme"]
    assert [probe.name for probe in catalog.choose(["ops"])] == ["ops"]


@pytest.mark.parametrize(
    ("stands_in", "program"),
    [("block_done_nested", "block_done"), ("nvme_nested", "nvme_complete")],
)
def test_a_program_that_stands_in_runs_after_the_one_it_stands_in_for(
    stands_in: str, program: str
) -> None:
    """Hooks are attached last one first, and the kernel runs them in that order."""
    hooks = {hook.name: hook for hook in compose(catalog.choose(["nvme"]), bcc=False).hooks}
    assert hooks[stands_in].event == hooks[program].event
    assert list(hooks).index(stands_in) < list(hooks).index(program)


def test_bucket_edges_are_those_of_the_c_code() -> None:
    text = (content.directory("probes") / "block_aggregates.bpf.h").read_text()
    for name, value in (
        ("KV_DEPTHS", aggregates.DEPTHS),
        ("KV_SIZES", aggregates.SIZES),
        ("KV_LATENCIES", aggregates.LATENCIES),
    ):
        assert f"\t{name} = {value},\n" in text
    sizes, latencies = aggregates.size_edges(), aggregates.latency_edges()
    assert sizes[:3].tolist() == [0, 512, 1024]
    assert latencies[:6].tolist() == [0, 1024, 1280, 1536, 1792, 2048]
    assert (np.diff(sizes) > 0).all()
    assert (np.diff(latencies) > 0).all()
    assert len(sizes) == aggregates.SIZES
    assert len(latencies) == aggregates.LATENCIES + 1


def test_root_constants_are_those_of_the_c_code() -> None:
    text = "".join(
        (content.directory("probes") / name).read_text()
        for name in ("filters.bpf.h", "lookups.bpf.c")
    )
    assert f"KV_ROOT = {roots.ROOT}," in text
    assert f"KV_ABOVE_ROOT = {roots.ABOVE_ROOT}" in text
    assert f"LOOKUPS_WORDS = {roots.PREFIX_BYTES // 8}," in text


@NEEDS_CLANG
def test_the_object_is_compiled_again_only_when_a_source_changed(folder: Path) -> None:
    path = folder / core_object.NAME
    first = core_object.read(core_object.source())
    stamp = path.stat().st_mtime_ns
    assert core_object.read(core_object.source()) == first
    assert path.stat().st_mtime_ns == stamp
    with (folder / "block.bpf.c").open("a") as out:
        out.write("ARRAY(block_more, u64, 1);\n")
    assert core_object.read(core_object.source()) != first
    assert path.stat().st_mtime_ns != stamp


def test_without_clang_a_stale_object_is_refused_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / core_object.NAME).write_bytes(b"of other sources")
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(KvprobeError, match="no clang to compile them") as caught:
        core_object.read(core_object.source())
    assert "--loader bcc" in caught.value.hint


@NEEDS_CLANG
def test_a_probe_that_does_not_compile_is_named(folder: Path) -> None:
    with (folder / "ops.bpf.c").open("a") as out:
        out.write("int broken(void) { return nonsense; }\n")
    with pytest.raises(KvprobeError, match=r"ops\.bpf\.c:\d+:\d+: error: .*nonsense"):
        core_object.read(core_object.source())


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("mine.toml", "table = 'ops'\nring_bytes = 4096", "has no mine.bpf.c"),
        ("block.toml", "table = 'nonsense'\nring_bytes = 4096", "kernel table"),
        ("block.toml", "table = 'block'\nring_bytes = 5000", "power of two"),
        ("block.toml", "table = 'block'\nring_bytes = 4096\nextra = 1", "unknown key extra"),
        ("block.toml", "table = ", "cannot read"),
    ],
)
def test_a_malformed_description_is_one_line(
    folder: Path, file: str, text: str, message: str
) -> None:
    (folder / file).write_text(text)
    with pytest.raises(KvprobeError, match=message):
        catalog.available()


def test_two_probes_may_not_use_one_name(folder: Path) -> None:
    for end in (".bpf.c", ".toml"):
        shutil.copy(folder / f"lookups{end}", folder / f"again{end}")
    with pytest.raises(KvprobeError, match="probes again and lookups both have a program named"):
        compose(catalog.choose(None), bcc=False)
