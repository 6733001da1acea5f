"""The BTF reader against sources that know better: the kernel's event formats, libbpf, clang."""

import ctypes
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvprobe.bpf import btf, tracefs
from kvprobe.bpf.btf import Btf, Field
from kvprobe.bpf.kernel_types import KernelTypes
from kvprobe.errors import KvprobeError

pytestmark = pytest.mark.skipif(not btf.VMLINUX.exists(), reason="this kernel exposes no BTF")


@pytest.fixture(scope="module")
def kernel() -> Btf:
    return Btf.load()


def test_every_field_of_the_kernels_event_formats(kernel: Btf) -> None:
    """tracefs prints the offsets the kernel's compiler chose; BTF must say the same."""
    root = tracefs.root()
    if root is None:
        pytest.skip("needs root: tracefs")
    checked = 0
    for category in ("block", "ext4", "filemap", "io_uring", "jbd2", "sched", "writeback"):
        for event in sorted(path.name for path in (root / "events" / category).glob("*/")):
            fields = tracefs.event_format(category, event) or {}
            record = f"trace_event_raw_{event}"
            if kernel.size(record) is None:
                continue  # an event of a class: the struct has the name of the class
            for name, (offset, size) in fields.items():
                if name.startswith("common_"):
                    path = f"ent.{name.removeprefix('common_')}"
                else:
                    path = name if kernel.field(record, name) else f"__data_loc_{name}"
                assert kernel.field(record, path) == Field(offset, size), (event, name)
                checked += 1
    assert checked > 500


def test_sizes_and_tracepoints_as_libbpf_sees_them(kernel: Btf) -> None:
    try:
        library = ctypes.CDLL("libbpf.so.1")
    except OSError:
        pytest.skip("libbpf.so.1 is not installed")
    library.btf__load_vmlinux_btf.restype = ctypes.c_void_p
    library.btf__resolve_size.restype = ctypes.c_int64
    image = ctypes.c_void_p(library.btf__load_vmlinux_btf())
    assert library.btf__type_cnt(image) == kernel.type_count
    names = (
        "request",
        "bio",
        "bio_vec",
        "inode",
        "file",
        "kiocb",
        "page",
        "task_struct",
        "gendisk",
    )
    for name in names:
        number = library.btf__find_by_name_kind(image, name.encode(), 4)
        assert kernel.size(name) == library.btf__resolve_size(image, number)
    for name, exists in (("bio_endio", True), ("bio_endio_not", False)):
        assert kernel.has_function(name) is exists
        assert (library.btf__find_by_name_kind(image, name.encode(), 12) > 0) is exists
    library.btf__free(image)


def test_known_names(kernel: Btf) -> None:
    assert kernel.tracepoint_args("block_rq_complete") == 3
    assert kernel.tracepoint_args("no_such_tracepoint") is None
    assert kernel.tracepoint_args("request") is None
    assert kernel.enumerator("BPF_MAP_TYPE_RINGBUF") == 27
    assert kernel.enumerator("NO_SUCH_ENUMERATOR") is None
    assert kernel.field("request", "no_such_field") is None
    assert kernel.field("request", "bio.bi_opf") is None, "a pointer is not an embedded struct"
    assert kernel.field("no_such_struct", "bio") is None
    assert kernel.size("no_such_struct") is None


SOURCE = """
typedef unsigned long long u64;
typedef const volatile u64 cv64;
enum small { KV_SIX = 6, KV_SEVEN = 7 };
union inner { char bytes[13]; u64 word; };
struct outer {
    char first;
    struct { short second; union { int third; struct { char fourth; cv64 fifth[3][5]; }; }; };
    unsigned low : 3, high : 11;
    union inner embedded;
    struct outer *next;
    struct { struct { int deep; } middle; } named;
    enum small kind;
};
#define AT(f) __builtin_offsetof(struct outer, f)
#define OF(f) sizeof(((struct outer *)0)->f)
#define BOTH(f) AT(f), OF(f)
u64 values[] __attribute__((section("answers"))) = {
    BOTH(first), BOTH(second), BOTH(third), BOTH(fourth), BOTH(fifth),
    BOTH(embedded), BOTH(embedded.word), BOTH(next), BOTH(named.middle.deep), BOTH(kind),
    sizeof(struct outer), sizeof(union inner),
};
struct outer use; int kv_function(struct outer *o) { return o->first; }
"""
PATHS = ["first", "second", "third", "fourth", "fifth", "embedded", "embedded.word", "next"]
PATHS += ["named.middle.deep", "kind"]


def test_layout_as_clang_compiled_it(tmp_path: Path) -> None:
    if not (shutil.which("clang") and shutil.which("llvm-objcopy")):
        pytest.skip("clang and llvm are not installed")
    source, made = tmp_path / "layout.c", tmp_path / "layout.o"
    source.write_text(SOURCE)
    subprocess.run(["clang", "-g", "-O1", "-target", "bpf", "-c", source, "-o", made], check=True)
    sections = {}
    for name in (".BTF", "answers"):
        dump = tmp_path / "section"
        subprocess.run(
            ["llvm-objcopy", f"--dump-section={name}={dump}", made, tmp_path / "copy.o"], check=True
        )
        sections[name] = dump.read_bytes()
    image = Btf(sections[".BTF"])
    *fields, outer_size, inner_size = struct.unpack("<22Q", sections["answers"])
    expected = [Field(*pair) for pair in zip(fields[::2], fields[1::2], strict=True)]
    assert [image.field("outer", path) for path in PATHS] == expected
    assert (image.size("outer"), image.size("inner")) == (outer_size, inner_size)
    low, high = image.field("outer", "low"), image.field("outer", "high")
    assert low is not None and high is not None
    assert (low.bits, high.bits) == (3, 11)
    assert 8 * high.offset + high.bit_offset == 8 * low.offset + low.bit_offset + 3
    assert image.enumerator("KV_SEVEN") == 7
    assert image.has_function("kv_function") and not image.has_function("outer")


# ---------------------------------------------------------------- made-up images


def image_of(types: list[tuple[int, ...]], strings: bytes) -> bytes:
    body = b"".join(struct.pack(f"<{len(words)}I", *words) for words in types)
    header = struct.pack("<HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(body), len(body), len(strings))
    return header + body + strings


def info(kind: int, elements: int = 0) -> int:
    return kind << 24 | elements


INT = (1, info(1), 4, 32)
STRINGS = b"\0int\0outer\0member\0btf_trace_x\0"
INT_NAME, OUTER, MEMBER, TRACE = 1, 5, 11, 18


def test_a_module_continues_its_base() -> None:
    base = Btf(image_of([INT, (OUTER, info(4, 1), 4, MEMBER, 1, 0)], STRINGS))
    extra = len(STRINGS)
    module = Btf(
        image_of([(extra + 1, info(4, 2), 8, MEMBER, 2, 0, extra + 5, 1, 32)], b"\0mod\0own\0"),
        base,
    )
    assert module.type_count == 4
    assert module.field("mod", "member.member") == Field(0, 4)
    assert module.field("mod", "own") == Field(4, 4)
    assert module.field("outer", "member") == Field(0, 4)
    assert base.field("mod", "own") is None


def test_modules_are_asked_where_the_kernel_has_no_such_name(tmp_path: Path) -> None:
    base = Btf(image_of([INT, (OUTER, info(4, 1), 4, MEMBER, 1, 0)], STRINGS))
    extra = len(STRINGS)

    def module(size: int, *strings: bytes) -> bytes:
        text = b"\0" + b"\0".join(strings) + b"\0"
        own = extra + 1 + text[1:].index(b"own")
        return image_of([(extra + 1, info(4, 1), size, own, 1, 8 * size - 32)], text)

    (tmp_path / "vmlinux").write_bytes(b"never read")
    (tmp_path / "first").write_bytes(module(8, b"mod", b"own"))
    (tmp_path / "second").write_bytes(module(16, b"mod", b"own"))
    (tmp_path / "third").write_bytes(module(32, b"other", b"own"))
    (tmp_path / "outer").write_bytes(
        image_of([(OUTER, info(4, 1), 64, extra + 1, 1, 0)], b"\0own\0")
    )
    types = KernelTypes(base, ("second",), tmp_path)
    assert types.field("mod", "own") == Field(12, 4), "the named module is asked first"
    assert KernelTypes(base, (), tmp_path).field("mod", "own") == Field(4, 4)
    assert (types.size("mod"), types.size("other"), types.size("none")) == (16, 32, None)
    assert types.size("outer") == 4
    assert types.field("outer", "own") is None, "the kernel's own structure hides a module's"
    assert types.field("other", "mod") is None
    (tmp_path / "third").write_bytes(b"replaced")
    assert types.size("other") == 32


def test_a_name_of_the_kernel_may_be_a_structure_of_a_module(tmp_path: Path) -> None:
    base = Btf(image_of([INT], STRINGS))
    (tmp_path / "module").write_bytes(image_of([(OUTER, info(4, 1), 4, MEMBER, 1, 0)], b"\0"))
    assert KernelTypes(base, (), tmp_path).field("outer", "member") == Field(0, 4)


def test_tracepoint_arity_counts_all_but_the_first_parameter() -> None:
    proto = (0, info(13, 3), 0, 0, 1, 0, 1, 0, 1)
    image = Btf(image_of([INT, proto, (0, info(2), 2), (TRACE, info(8), 3)], STRINGS))
    assert image.tracepoint_args("x") == 2


def test_enumerators_with_a_sign_and_of_64_bits() -> None:
    signed = 1 << 31
    image = Btf(
        image_of(
            [
                INT,
                (OUTER, info(6, 2) | signed, 4, MEMBER, 7, TRACE, 2**32 - 7),
                (OUTER, info(19, 1), 8, INT_NAME, 5, 3),
            ],
            STRINGS,
        )
    )
    assert image.enumerator("member") == 7
    assert image.enumerator("btf_trace_x") == -7
    assert image.enumerator("int") == 3 << 32 | 5
    assert image.enumerator("outer") is None, "an enum's own name is no enumerator"


def test_two_layouts_under_one_name_are_refused() -> None:
    one, two = (OUTER, info(4, 1), 4, MEMBER, 1, 0), (OUTER, info(4, 1), 8, MEMBER, 1, 32)
    assert Btf(image_of([INT, one, one], STRINGS)).field("outer", "member") == Field(0, 4)
    with pytest.raises(KvprobeError, match="two layouts"):
        Btf(image_of([INT, one, two], STRINGS)).field("outer", "member")


@pytest.mark.parametrize(
    "types",
    [
        [(OUTER, info(0), 4)],  # kind 0
        [(OUTER, info(25), 4)],  # an unknown kind
        [(OUTER, info(4, 9), 4, MEMBER, 1, 0)],  # fewer members than promised
        [INT, (OUTER,)],  # half a record
    ],
)
def test_records_that_do_not_add_up(types: list[tuple[int, ...]]) -> None:
    with pytest.raises(KvprobeError, match="damaged"):
        Btf(image_of(types, STRINGS))


@pytest.mark.parametrize(
    "types",
    [
        [(OUTER, info(4, 1), 4, MEMBER, 2, 0), (INT_NAME, info(8), 2)],  # a typedef of itself
        [(OUTER, info(4, 1), 4, 0, 1, 0)],  # an anonymous member of its own type
        [(OUTER, info(4, 1), 4, MEMBER, 99, 0)],  # a type that is not there
        [(OUTER, info(4, 1), 4, 4000, 1, 0)],  # a name that is not there
        [(0, info(3), 0, 1, 1, 3), (OUTER, info(4, 1), 4, MEMBER, 1, 0)],  # an array of itself
    ],
)
def test_references_that_lead_nowhere(types: list[tuple[int, ...]]) -> None:
    image = Btf(image_of(types, STRINGS))
    with pytest.raises(KvprobeError, match="damaged"):
        image.field("outer", "member")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damage_is_one_error_and_never_a_traceback(data: st.DataObject) -> None:
    proto = (0, info(13, 3), 0, 0, 1, 0, 1, 0, 1)
    whole = image_of(
        [INT, (OUTER, info(4, 1), 4, MEMBER, 1, 0), proto, (0, info(2), 3), (TRACE, info(8), 4)],
        STRINGS,
    )
    raw = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for _ in range(data.draw(st.integers(0, 3))):
        if raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        image = Btf(bytes(raw))
        image.field("outer", "member")
        image.size("outer")
        image.tracepoint_args("x")
        image.enumerator("member")
        image.has_function("int")
    except KvprobeError as error:
        assert "\n" not in error.message


def test_a_truncated_kernel_image_is_refused(tmp_path: Path) -> None:
    whole = btf.VMLINUX.read_bytes()
    for keep in (0, 3, 23, 24, 1009, len(whole) // 2, len(whole) - 1):
        cut = tmp_path / "cut"
        cut.write_bytes(whole[:keep])
        with pytest.raises(KvprobeError, match=str(cut)):
            Btf.load(cut)


def test_no_image_is_one_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(KvprobeError) as caught:
        Btf.load(tmp_path / "none")
    assert "doctor" in caught.value.hint
