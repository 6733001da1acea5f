"""What a kernel offers to a probe: function probes, events of modules, events that fill in."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvprobe.bpf import attach, bcc_loader, core_object, machine
from kvprobe.bpf.btf import Btf
from kvprobe.bpf.catalog import Probe
from kvprobe.bpf.compose import Hook, Source, compose, files_of
from kvprobe.bpf.loaded import Plan
from kvprobe.errors import KvprobeError

pytestmark = pytest.mark.root

HAS_FUNCTION_PROBES = attach.FUNCTION_EVENTS.is_dir()
ABSENT = "module_from_the_future"

TEXT = f"""
struct vehicle {{ u64 wheels; u16 doors; u8 seats[5]; }} KERNEL_STRUCT;
RING(ops);
ARRAY(tiny_sums, u64, 4);
inline_always int tiny_add(u64 n)
{{
	u32 zero = 0;
	u64 *sum = LOOKUP(tiny_sums, &zero);

	if (sum)
		ATOMIC_ADD(sum, n);
	return 0;
}}
FUNCTION_ENTER(tiny_enter, vfs_read)
{{
	return tiny_add(FUNCTION_ARG(0) + FUNCTION_ARG(1) + FUNCTION_ARG(2) + FUNCTION_ARG(3) +
			FUNCTION_ARG(4) + FUNCTION_ARG(5));
}}
FUNCTION_EXIT(tiny_exit, vfs_read)
{{
	return tiny_add(FUNCTION_RESULT);
}}
FUNCTION_ENTER(tiny_future, function_from_the_future)
{{
	return 0;
}}
RAW_HOOK(tiny_module, event_from_the_future, {ABSENT})
{{
	u64 vehicle = ARG(0);

	if (!HAS_TYPE(vehicle) || !HAS_FIELD(vehicle, doors))
		return tiny_add(TYPE_SIZE(vehicle));
	return tiny_add(READ_MODULE(vehicle, doors, vehicle) + READ_MODULE(vehicle, wheels, vehicle) +
			READ_AT(u8, ADDRESS(vehicle, seats, vehicle)));
}}
FUNCTION_ENTER(tiny_module_enter, function_of_the_module, {ABSENT})
{{
	return 0;
}}
RAW_HOOK(tiny_new, event_of_tomorrow)
{{
	return ARGUMENTS(event_of_tomorrow);
}}
RAW_HOOK(tiny_old, sched_process_exit)
{{
	return 0;
}}
RAW_HOOK(tiny_there, sched_process_fork)
{{
	return 0;
}}
RAW_HOOK(tiny_idle, sched_process_exec)
{{
	return 0;
}}
"""
INSTEAD = {"event_of_tomorrow": "sched_process_exit", "sched_process_fork": "sched_process_exec"}


def tiny(folder: Path, *, bcc: bool, plain: bool = False, **more: object) -> tuple[Probe, Source]:
    path = folder / "tiny.bpf.c"
    path.write_text(TEXT)
    probe = Probe("tiny", "", "ops", 4096, path, **more)  # type: ignore[arg-type]
    return probe, compose([probe], bcc=bcc, plain=plain)


def mine(hooks: tuple[Hook, ...]) -> set[str]:
    return {hook.name for hook in hooks if hook.probe == "tiny"}


def test_function_probes_are_found_by_trying() -> None:
    asked = {"vfs_read", "function_from_the_future", "vfs_read.isra.0"}
    assert attach.traceable(asked) == ({"vfs_read"} if HAS_FUNCTION_PROBES else set())


def test_what_is_missing_is_told_once_and_with_its_effect(tmp_path: Path) -> None:
    hides = {"vfs_read": "reads", ABSENT: "vehicles", "function_from_the_future": "the future"}
    probe, source = tiny(tmp_path, bcc=False, hides=hides, instead=INSTEAD)
    assert source.modules == (ABSENT,)
    offer = machine.examine(source, [probe], Btf.load())
    found = {gap.what: (gap.why, gap.effect) for gap in offer.missing}
    assert found[f"module {ABSENT}"] == ("it is not loaded", "vehicles")
    assert found["function function_from_the_future"][1] == "the future"
    assert len(found) == len(offer.missing) == (2 if HAS_FUNCTION_PROBES else 3)
    assert mine(offer.hooks) - {"tiny_enter", "tiny_exit"} == {"tiny_old", "tiny_there"}
    assert offer.unused["tiny"] == {"event_of_tomorrow", "sched_process_exec"}
    assert offer.constants["arguments", "event_of_tomorrow"] == 0


def test_a_module_that_nobody_has_to_have_is_not_mentioned(tmp_path: Path) -> None:
    probe, source = tiny(tmp_path, bcc=False, instead=INSTEAD)
    whats = [gap.what for gap in machine.examine(source, [probe], Btf.load()).missing]
    assert not [what for what in whats if ABSENT in what or "event" in what]


def test_without_both_events_the_first_is_missed(tmp_path: Path) -> None:
    instead = {"event_of_tomorrow": "event_from_the_future"}
    probe, source = tiny(tmp_path, bcc=False, instead=instead)
    offer = machine.examine(source, [probe], Btf.load())
    assert "tracepoint event_of_tomorrow" in {gap.what for gap in offer.missing}
    assert offer.unused["tiny"] == frozenset()


def test_a_probe_is_left_out_where_its_module_is_not_loaded(tmp_path: Path) -> None:
    probe, _ = tiny(tmp_path, bcc=False, needs=ABSENT, hides={ABSENT: "vehicles: no garage"})
    other, _ = tiny(tmp_path, bcc=False)
    here, (missing,) = machine.present([probe, other])
    assert here == (other,)
    assert (missing.what, missing.effect) == (f"module {ABSENT}", "vehicles: no garage")


@pytest.mark.parametrize("plain", [False, True])
def test_core_loads_hooks_of_functions_and_modules(tmp_path: Path, plain: bool) -> None:
    """Programs of absent modules and functions load as well: nothing in them can be reached."""
    from kvprobe.bpf import libbpf

    _, source = tiny(tmp_path, bcc=False, plain=plain)
    image = core_object.compile_to(tmp_path / "tiny.o", source).read_bytes()
    lib = libbpf.library()
    with libbpf.Messages() as messages:
        opened = lib.bpf_object__open_mem(image, len(image), None)
        assert opened, messages.lines
        try:
            assert lib.bpf_object__load(opened) == 0, messages.lines
            names = {name for name, _ in libbpf.programs(opened)}
        finally:
            lib.bpf_object__close(opened)
    assert {hook.name for hook in source.hooks} <= names


@pytest.mark.skipif(
    not (bcc_loader.DEBIAN_PACKAGES / "bcc").is_dir(), reason="python3-bpfcc is not installed"
)
def test_bcc_loads_hooks_of_functions_and_modules(tmp_path: Path) -> None:
    _, source = tiny(tmp_path, bcc=True)
    programs = frozenset(hook.name for hook in source.hooks)
    plan = Plan(programs, dict.fromkeys(source.constants, 0), {"ops": 4096})
    loaded = bcc_loader.load(source, plan)
    try:
        assert set(loaded.programs) == programs
    finally:
        loaded.close()


def test_included_files_come_first_and_once(tmp_path: Path) -> None:
    (tmp_path / "part_a.bpf.h").write_text('#include "part_b.bpf.h"\nARRAY(shared_a, u64, 1);\n')
    (tmp_path / "part_b.bpf.h").write_text("ARRAY(shared_b, u64, 1);\n")
    probes = []
    for name in ("one", "two"):
        path = tmp_path / f"{name}.bpf.c"
        includes = '#include "part_a.bpf.h"\n#include "part_b.bpf.h"\n'
        path.write_text(f"{includes}ARRAY({name}, u64, 1);\n")
        probes.append(Probe(name, "", "ops", 4096, path))
    assert [path.name for path in files_of(probes[0])] == [
        "part_b.bpf.h", "part_a.bpf.h", "one.bpf.c",
    ]  # fmt: skip
    source = compose(probes, bcc=False)
    users = {item.name: item.users for item in source.maps if item.users[0] != "filters"}
    assert users["shared_a"] == users["shared_b"] == ("one", "two")
    assert (users["one"], users["two"]) == (("one",), ("two",))
    assert source.text.count("ARRAY(shared_b, u64, 1)") == 1
    (tmp_path / "part_b.bpf.h").write_text('#include "part_a.bpf.h"\n')
    with pytest.raises(KvprobeError, match="includes itself"):
        files_of(probes[0])


def test_a_multipath_disk_is_known_by_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "DISKS", tmp_path)
    for number, place in {
        "259:1": "devices/virtual/nvme-subsystem/nvme-subsys0/nvme0n1",
        "259:3": "devices/pci0000:00/0000:00:04.0/nvme/nvme1/nvme1n1",
        "7:0": "devices/virtual/block/loop0",
    }.items():
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / number).symlink_to(tmp_path / place)
    assert machine.is_multipath(259 << 20 | 1)
    assert not machine.is_multipath(259 << 20 | 3)
    assert not machine.is_multipath(7 << 20)
    assert not machine.is_multipath(8 << 20)
