"""The include tree for bcc: both architectures, page sizes, and refusal of foreign headers."""

import shutil
import subprocess
from pathlib import Path

import pytest

from kvprobe.bpf import stubs
from kvprobe.errors import KvprobeError

PROBE = """
#include <linux/kconfig.h>
#include <uapi/linux/ptrace.h>
#include <uapi/linux/bpf.h>
#include <uapi/linux/if_packet.h>
#include <linux/version.h>
#include <linux/log2.h>
#include <asm/page.h>
#include <linux/bpf_common.h>
_Static_assert(PAGE_SIZE == %d, "page");
_Static_assert(LINUX_VERSION_CODE == KERNEL_VERSION(6, 1, 255), "version");
_Static_assert(sizeof(struct pt_regs) %% 8 == 0 && sizeof(u64) == 8 && sizeof(dev_t) == 4, "types");
_Static_assert(offsetof(struct pt_regs, %s) == %d, "registers");
"""


@pytest.mark.parametrize(
    ("machine", "arch", "page", "register", "offset"),
    [("x86_64", "x86", 4096, "di", 112), ("aarch64", "arm64", 65536, "pc", 256)],
)
def test_the_tree_compiles(
    tmp_path: Path, machine: str, arch: str, page: int, register: str, offset: int
) -> None:
    if not shutil.which("clang"):
        pytest.skip("clang is not installed")
    stubs.write(tmp_path, release="6.1.999-57-amd64", machine=machine, page_bytes=page)
    source = PROBE % (page, register, offset)
    subprocess.run(
        ["clang", "-nostdinc", "-fsyntax-only", "-Werror", "-x", "c", "-", "-target", "bpf"]
        + [f"-I{tmp_path}/{place}" for place in ("include", f"arch/{arch}/include")],
        input=source.encode(),
        check=True,
    )


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvprobeError, match="s390x"):
        stubs.write(tmp_path, machine="s390x")
    assert not list(tmp_path.iterdir())


def test_version_code_caps_the_sublevel() -> None:
    assert stubs.version_code("6.1.0-57-amd64") == 0x060100
    assert stubs.version_code("5.10.300") == 0x050AFF
    assert stubs.version_code("6.18") == 0x061200


def test_headers_of_another_kernel_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KvprobeError, match="names no release"):
        stubs.headers_of_this_kernel(tmp_path)
    generated = tmp_path / "include/generated/utsrelease.h"
    generated.parent.mkdir(parents=True)
    generated.write_text('#define UTS_RELEASE "6.1.0-57-amd64"\n')
    with pytest.raises(KvprobeError, match=r"are of 6.1.0-57-amd64, the running kernel is 6.18"):
        stubs.headers_of_this_kernel(tmp_path, "6.18.44")
    assert stubs.headers_of_this_kernel(tmp_path, "6.1.0-57-amd64") == tmp_path
