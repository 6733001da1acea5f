"""In a guest: function probes of both loaders, at a function whose arguments are known."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

from kvprobe.bpf import attach, bcc_loader, core_loader, core_object, maps
from kvprobe.bpf.btf import Btf
from kvprobe.bpf.catalog import Probe
from kvprobe.bpf.compose import Source, compose
from kvprobe.bpf.loaded import Loaded, Plan

CALLS = 31
ASKED_BYTES = 4999
PLACE = 70001
FILE_BYTES = PLACE + 1009
"""Where every call ends early: its result is not what it asked for."""

TEXT = f"""
RING(ops);
ARRAY(lab_sums, u64, 4);
inline_always void lab_add(u32 index, u64 n)
{{
	u64 *sum = LOOKUP(lab_sums, &index);

	if (sum)
		ATOMIC_ADD(sum, n);
}}
inline_always bool lab_is_it(void)
{{
	return bpf_get_current_pid_tgid() >> 32 == CONFIG(own_tgid);
}}
FUNCTION_ENTER(lab_enter, vfs_read)
{{
	if (!lab_is_it() || FUNCTION_ARG(2) != {ASKED_BYTES})
		return 0;
	lab_add(0, 1);
	lab_add(1, READ_AT(s64, FUNCTION_ARG(3)));
	lab_add(2, READ(inode, i_size, READ(file, f_inode, FUNCTION_ARG(0))));
	return 0;
}}
FUNCTION_EXIT(lab_exit, vfs_read)
{{
	if (lab_is_it() && FUNCTION_RESULT == {FILE_BYTES - PLACE})
		lab_add(3, FUNCTION_RESULT);
	return 0;
}}
"""
EXPECTED = [CALLS, CALLS * PLACE, CALLS * FILE_BYTES, CALLS * (FILE_BYTES - PLACE)]


def sums() -> dict[str, list[int]]:
    """What the programs of each loader add up: see EXPECTED.

    Raises:
        KvprobeError: something does not load or attach.
    """
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "lab.bpf.c"
        path.write_text(TEXT)
        probe = Probe("lab", "", "ops", 4096, path)
        return {loader: _sums(probe, loader, Path(name)) for loader in ("core", "bcc")}


def _sums(probe: Probe, loader: str, folder: Path) -> list[int]:
    plain = core_object.must_be_plain(Btf.load())
    source = compose([probe], bcc=loader == "bcc", plain=plain and loader == "core")
    loaded = _loaded(source, loader, folder)
    links = []
    try:
        for hook in source.hooks:
            if hook.is_function:
                on_return = hook.kind == "exit"
                program = loaded.programs[hook.name]
                links.append(attach.attach_function(program, hook.event, on_return))
        _work(folder / "file")
        found = maps.array_words(loaded.maps["lab_sums"], 4, 1)
        return [int(value) for value in found[:, 0]]
    finally:
        for link in links:
            os.close(link)
        loaded.close()


def _loaded(source: Source, loader: str, folder: Path) -> Loaded:
    constants = {**dict.fromkeys(source.constants, 0), ("config", "own_tgid"): os.getpid()}
    names = frozenset(hook.name for hook in source.hooks if hook.is_function)
    plan = Plan(names, constants, {"ops": 4096})
    if loader == "bcc":
        return bcc_loader.load(source, plan)
    image = core_object.compile_to(folder / "lab.o", source).read_bytes()
    with mock.patch.object(core_object, "read", lambda source: image):
        return core_loader.load(source, plan)


def _work(path: Path) -> None:
    path.write_bytes(bytes(FILE_BYTES))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        for _ in range(CALLS):
            os.pread(descriptor, ASKED_BYTES, PLACE)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    print(sums(), EXPECTED)
    sys.exit(set(map(tuple, sums().values())) != {tuple(EXPECTED)})
