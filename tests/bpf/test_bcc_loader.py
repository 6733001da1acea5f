"""The bcc loader: real probes load, and what cannot be loaded is one line."""

import os
import platform
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvprobe.bpf import attach, bcc_loader, catalog, compose, machine, maps, stubs
from kvprobe.bpf.btf import Btf
from kvprobe.bpf.catalog import Probe
from kvprobe.bpf.kernel_types import KernelTypes
from kvprobe.bpf.loaded import Loaded, Plan
from kvprobe.errors import KvprobeError

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        not (bcc_loader.DEBIAN_PACKAGES / "bcc").is_dir(), reason="python3-bpfcc is not installed"
    ),
]


@pytest.fixture(autouse=True)
def logs_of_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


RESULTS = "ARRAY(tiny_results, u64, 4);\n"
COUNTER = (
    RESULTS
    + """
RAW_HOOK(tiny_count, sys_enter)
{
	u32 zero = 0, one = 1;
	u64 *count = LOOKUP(tiny_results, &zero), *sum = LOOKUP(tiny_results, &one);

	if (CONFIG(own_tgid) != bpf_get_current_pid_tgid() >> 32 || !count || !sum)
		return 0;
	ATOMIC_ADD(sum, FETCH_ADD(count, 1));
	return 0;
}
"""
)


def composed(folder: Path, text: str) -> compose.Source:
    """A probe of our own in the real dialect."""
    path = folder / "tiny.bpf.c"
    path.write_text(f"RING(block);\n{text}")
    return compose.compose([Probe("tiny", "", "block", 4096, path)], bcc=True)


def plan(source: compose.Source, *programs: str) -> Plan:
    constants = dict.fromkeys(source.constants, 0)
    constants["config", "own_tgid"] = os.getpid()
    rings = {item.name: 1 << 20 for item in source.maps if item.kind == "RING"}
    return Plan(frozenset(programs), constants, rings)


def load(folder: Path, text: str, *programs: str) -> Loaded:
    source = composed(folder, text)
    return bcc_loader.load(source, plan(source, *programs))


def refused(folder: Path, text: str) -> str:
    """The message of the refusal; the hint must name a log that exists."""
    with pytest.raises(KvprobeError) as caught:
        load(folder, text, "tiny_program").close()
    assert "\n" not in caught.value.message
    log = Path(caught.value.hint.split()[-1])
    assert log.read_text()
    log.unlink()
    return caught.value.message


def program(body: str) -> str:
    return f"RAW_HOOK(tiny_program, sys_enter)\n{{\n{body}\n\treturn 0;\n}}\n"


def result(loaded: Loaded, index: int) -> int:
    value = maps.lookup(loaded.maps["tiny_results"], struct.pack("=I", index), 8)
    assert value is not None
    return int.from_bytes(value, sys.byteorder)


def test_every_shipped_probe_loads_and_leaves_nothing_here() -> None:
    probes, _ = machine.present(catalog.choose(None))
    source = compose.compose(probes, bcc=True)
    programs = [hook.name for hook in machine.examine(source, probes, Btf.load()).hooks]
    assert programs
    before = len(os.listdir("/proc/self/fd"))
    environment, folder = dict(os.environ), Path.cwd()
    loaded = bcc_loader.load(source, plan(source, *programs))
    assert set(loaded.programs) == set(programs)
    assert set(loaded.maps) == {item.name for item in source.maps}
    assert not any(map(os.get_inheritable, (*loaded.programs.values(), *loaded.maps.values())))
    loaded.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert (dict(os.environ), Path.cwd()) == (environment, folder)
    assert "bcc" not in sys.modules
    assert "libbcc" not in Path("/proc/self/maps").read_text()


def test_a_program_runs_and_atomics_return_the_old_value(tmp_path: Path) -> None:
    loaded = load(tmp_path, COUNTER, "tiny_count")
    try:
        link = attach.attach_raw_tracepoint(loaded.programs["tiny_count"], "sys_enter")
        for _ in range(1009):
            os.getppid()
        os.close(link)
        count, total = result(loaded, 0), result(loaded, 1)
    finally:
        loaded.close()
    assert count >= 1009
    assert total == count * (count - 1) // 2, "0 + 1 + .. + (count - 1)"


def test_exchange_and_narrow_counters(tmp_path: Path) -> None:
    text = (
        "ARRAY(tiny_small, u32, 2);\n"
        + RESULTS
        + """
RAW_HOOK(tiny_swap, sys_enter)
{
	u32 zero = 0, one = 1, two = 2;
	u32 *small = LOOKUP(tiny_small, &zero), *guard = LOOKUP(tiny_small, &one);
	u64 *last = LOOKUP(tiny_results, &zero), *old = LOOKUP(tiny_results, &one);
	u64 *narrow = LOOKUP(tiny_results, &two);

	if (CONFIG(own_tgid) != bpf_get_current_pid_tgid() >> 32)
		return 0;
	if (!small || !guard || !last || !old || !narrow || FETCH_ADD(guard, 1) >= 7)
		return 0;
	*old = EXCHANGE(last, *last + 11);
	*narrow = FETCH_ADD(small, 13);
	return 0;
}
"""
    )
    loaded = load(tmp_path, text, "tiny_swap")
    try:
        link = attach.attach_raw_tracepoint(loaded.programs["tiny_swap"], "sys_enter")
        for _ in range(23):
            os.getppid()
        os.close(link)
        assert [result(loaded, index) for index in range(3)] == [7 * 11, 6 * 11, 6 * 13]
        small = maps.lookup(loaded.maps["tiny_small"], bytes(4), 4)
        assert small == struct.pack("=I", 7 * 13)
    finally:
        loaded.close()


def test_a_syntax_error_names_the_place(tmp_path: Path) -> None:
    message = refused(tmp_path, program("\n\tu64 a = b;"))
    assert message == (
        "bcc cannot compile the probes: tiny.bpf.c:5: use of undeclared identifier 'b'"
    )


def test_what_the_verifier_refuses_is_in_its_words(tmp_path: Path) -> None:
    message = refused(tmp_path, program("\t*(u64 *)8 = 1;"))
    assert message == "the kernel refuses program tiny_program: R1 invalid mem access 'scalar'"


FIELDS = """
struct inode___tiny {
	u64 i_no_such_field;
} KERNEL_STRUCT;
"""


def test_a_field_that_the_kernel_lacks(tmp_path: Path) -> None:
    read = "u64 value = READ(inode___tiny, i_no_such_field, ARG(0));\n\tif (value == 3) return 1;"
    message = refused(tmp_path, FIELDS + program(f"\t{read}"))
    assert "it uses a field that this kernel does not have" in message
    guarded = f"\tif (HAS_FIELD(inode___tiny, i_no_such_field)) {{ {read} }}"
    load(tmp_path, FIELDS + program(guarded), "tiny_program").close()


def test_a_field_declared_with_another_size(tmp_path: Path) -> None:
    text = "struct inode___tiny { u16 i_size; } KERNEL_STRUCT;\n"
    message = refused(tmp_path, text + program("\treturn READ(inode___tiny, i_size, ARG(0));"))
    assert "in this kernel the size of inode___tiny.i_size differs" in message.replace('"', "")


def test_a_bit_field_is_refused(tmp_path: Path) -> None:
    text = "struct task_struct___tiny { u32 sched_reset_on_fork; } KERNEL_STRUCT;\n"
    read = "\treturn READ(task_struct___tiny, sched_reset_on_fork, ARG(0));"
    source = composed(tmp_path, text + program(read))
    with pytest.raises(KvprobeError, match="is a bit field"):
        bcc_loader.load(source, plan(source))


def test_macros_say_what_btf_says(tmp_path: Path) -> None:
    kernel = Btf.load()
    body = "\treturn READ(inode, i_ino, ARG(0)) + TYPE_SIZE(page) + HAS_TYPE(no_such_type);"
    source = composed(tmp_path, "struct page { u64 flags; };\n" + program(body))
    found = dict(bcc_loader.macros(source, plan(source), KernelTypes(kernel)))
    place = kernel.field("inode", "i_ino")
    assert place is not None
    assert found["O_inode_i_ino"] == str(place.offset)
    assert (found["H_inode_i_ino"], found["S_inode_i_ino"]) == ("1", str(place.size))
    assert found["T_page"] == str(kernel.size("page"))
    assert found["T_no_such_type"] == "0"


def test_the_bcc_of_pypi_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bcc").mkdir()
    (tmp_path / "bcc/__init__.py").write_text("raise SystemExit('must not be imported')")
    monkeypatch.setattr(bcc_loader, "DEBIAN_PACKAGES", tmp_path)
    with pytest.raises(KvprobeError, match="no BPF Compiler Collection") as caught:
        load(tmp_path, program(""), "tiny_program")
    assert "apt install python3-bpfcc" in caught.value.hint


def test_a_broken_bcc_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bcc").mkdir()
    (tmp_path / "bcc/libbcc.py").write_text("")
    (tmp_path / "bcc/__init__.py").write_text("import no_such_module")
    monkeypatch.setattr(bcc_loader, "DEBIAN_PACKAGES", tmp_path)
    with pytest.raises(KvprobeError, match="does not load: No module named 'no_such_module'"):
        load(tmp_path, program(""), "tiny_program")


def test_only_bcc_becomes_importable() -> None:
    """The folder of Debian's packages holds many; none but bcc may shadow ours."""
    text = (
        "import sys; from pathlib import Path\n"
        "from kvprobe.bpf.bcc_child import import_bcc\n"
        f"import_bcc(Path({str(bcc_loader.DEBIAN_PACKAGES)!r}))\n"
        f"assert {str(bcc_loader.DEBIAN_PACKAGES)!r} not in sys.path\n"
        "assert 'bcc.table' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", text], check=True)


def test_a_compiler_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(KvprobeError, match="bcc cannot compile the probes: the compiler"):
        load(tmp_path, program(""), "tiny_program")
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_environment_does_not_change_what_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "linux").mkdir()
    (tmp_path / "linux/types.h").write_text("#error foreign header\n")
    monkeypatch.setenv("CPATH", str(tmp_path))
    monkeypatch.setenv("ARCH", "mips")
    monkeypatch.setenv("BCC_KERNEL_SOURCE", str(tmp_path))
    load(tmp_path, program(""), "tiny_program").close()


def test_kernel_headers_by_wish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "headers"
    stubs.write(tree)
    release = tree / "include/config/kernel.release"
    release.parent.mkdir()
    release.write_text("6.1.0-57-amd64\n")
    monkeypatch.setenv(stubs.HEADERS_VARIABLE, str(tree))
    with pytest.raises(KvprobeError, match=r"are of 6.1.0-57-amd64, the running kernel is"):
        load(tmp_path, program(""), "tiny_program")
    release.write_text(f"{platform.release()}\n")
    load(tmp_path, program(""), "tiny_program").close()
    (tree / "include/linux/types.h").write_text("#error this tree is used\n")
    with pytest.raises(KvprobeError, match="this tree is used"):
        load(tmp_path, program(""), "tiny_program")
