"""The few header files that bcc insists on, written for the running kernel.

bcc was made to compile against a full kernel header tree, which production machines rarely have
and which, when it belongs to another kernel, compiles fine and reads garbage. kvprobe's probes
need no kernel header: struct offsets come from BTF. What bcc's own prelude includes is a dozen
names, and this module writes just those.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from kvprobe.errors import ExitCode, KvprobeError

HEADERS_VARIABLE = "KVPROBE_KERNEL_HEADERS"

_TYPES = """\
#ifndef KVPROBE_TYPES_H
#define KVPROBE_TYPES_H
typedef signed char __s8; typedef unsigned char __u8;
typedef short __s16; typedef unsigned short __u16;
typedef int __s32; typedef unsigned int __u32;
typedef long long __s64; typedef unsigned long long __u64;
typedef __s8 s8; typedef __u8 u8; typedef __s16 s16; typedef __u16 u16;
typedef __s32 s32; typedef __u32 u32; typedef __s64 s64; typedef __u64 u64;
typedef __s8 int8_t; typedef __u8 uint8_t; typedef __s16 int16_t; typedef __u16 uint16_t;
typedef __s32 int32_t; typedef __u32 uint32_t; typedef __s64 int64_t; typedef __u64 uint64_t;
typedef __u16 __le16, __be16, __sum16;
typedef __u32 __le32, __be32, __wsum;
typedef __u64 __le64, __be64;
#define __aligned_u64 __u64 __attribute__((aligned(8)))
typedef _Bool bool;
enum { false = 0, true = 1 };
typedef unsigned long size_t; typedef long ssize_t;
typedef unsigned long uintptr_t; typedef long intptr_t;
typedef unsigned int uint; typedef unsigned long ulong;
typedef u32 dev_t; typedef u64 sector_t; typedef int pid_t; typedef unsigned int uid_t, gid_t;
typedef unsigned short umode_t, sa_family_t; typedef long long loff_t; typedef long off_t;
typedef unsigned long ino_t; typedef unsigned int gfp_t, fmode_t; typedef u64 phys_addr_t;
#ifndef NULL
#define NULL ((void *)0)
#endif
#define __always_inline inline __attribute__((always_inline))
#define __user
#define __force
#define __bitwise
#define offsetof(type, member) __builtin_offsetof(type, member)
#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)
%(registers)s
#endif
"""

# Only for bcc's function-argument macros; the layouts are part of the perf and ptrace ABI.
_REGISTERS = {
    "x86": "struct pt_regs { unsigned long r15, r14, r13, r12, bp, bx, r11, r10, r9, r8, ax, cx,\n"
    "\tdx, si, di, orig_ax, ip, cs, flags, sp, ss; };",
    "arm64": "struct user_pt_regs { __u64 regs[31], sp, pc, pstate; };\n"
    "struct pt_regs { __u64 regs[31], sp, pc, pstate, orig_x0; };",
}
_CONFIG = {
    "x86": "#define CONFIG_X86_64 1\n#define CONFIG_ARCH_HAS_SYSCALL_WRAPPER 1\n",
    "arm64": "#define CONFIG_ARM64 1\n#define CONFIG_ARCH_HAS_SYSCALL_WRAPPER 1\n",
}
_ARCHITECTURES = {"x86_64": "x86", "aarch64": "arm64"}

_FILES = {
    "include/linux/kconfig.h": "#define CONFIG_BPF_SYSCALL 1\n#define CONFIG_64BIT 1\n%(config)s",
    "include/linux/types.h": _TYPES,
    "include/linux/version.h": "#define LINUX_VERSION_CODE %(version)d\n"
    "#define KERNEL_VERSION(a, b, c) (((a) << 16) + ((b) << 8) + ((c) > 255 ? 255 : (c)))\n",
    "include/linux/bpf.h": "#include <linux/types.h>\n",
    "include/linux/bpf_common.h": "",
    "include/linux/log2.h": "",
    "include/uapi/linux/bpf.h": "#include <linux/types.h>\n#include <linux/bpf.h>\n",
    "include/uapi/linux/bpf_common.h": "",
    "include/uapi/linux/if_packet.h": "",
    "include/uapi/linux/ptrace.h": "#include <linux/types.h>\n",
    "include/uapi/linux/types.h": "#include <linux/types.h>\n",
    "arch/%(arch)s/include/asm/page.h": "#define PAGE_SHIFT %(page_shift)d\n"
    "#define PAGE_SIZE (1UL << PAGE_SHIFT)\n",
}


def write(
    root: Path,
    *,
    release: str | None = None,
    machine: str | None = None,
    page_bytes: int | None = None,
) -> None:
    """Write the include tree below ``root``, for the running kernel unless told otherwise.

    Raises:
        KvprobeError: bcc is not supported on this architecture.
    """
    machine = machine or platform.machine()
    arch = _ARCHITECTURES.get(machine)
    if arch is None:
        raise KvprobeError(
            f"the bcc loader does not know {machine}",
            "use --loader core, or run kvprobe on x86_64 or aarch64",
            ExitCode.UNSUPPORTED,
        )
    values = {
        "arch": arch,
        "registers": _REGISTERS[arch],
        "config": _CONFIG[arch],
        "version": version_code(release or platform.release()),
        "page_shift": (page_bytes or os.sysconf("SC_PAGE_SIZE")).bit_length() - 1,
    }
    for name, text in _FILES.items():
        path = root / (name % values)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text % values)


def version_code(release: str) -> int:
    """``LINUX_VERSION_CODE`` of a release such as ``6.1.0-57-amd64``."""
    numbers = [int(n) for n in re.findall(r"\d+", release)[:3]] + [0, 0, 0]
    return (numbers[0] << 16) + (numbers[1] << 8) + min(numbers[2], 255)


def headers_of_this_kernel(root: Path, release: str | None = None) -> Path:
    """Check that a kernel header tree belongs to the running kernel, and return it.

    Raises:
        KvprobeError: the tree does not say what it belongs to, or belongs to another kernel.
    """
    running = release or platform.release()
    theirs = _release_of(root)
    if theirs is None:
        raise KvprobeError(
            f"no kernel header tree at {root}: it names no release",
            f"unset {HEADERS_VARIABLE}: kvprobe needs no kernel headers",
        )
    if theirs != running:
        raise KvprobeError(
            f"kernel headers at {root} are of {theirs}, the running kernel is {running}",
            f"unset {HEADERS_VARIABLE}: kvprobe needs no kernel headers",
        )
    return root


def _release_of(root: Path) -> str | None:
    for name, pattern in (
        ("include/config/kernel.release", r"(\S+)"),
        ("include/generated/utsrelease.h", r'#define\s+UTS_RELEASE\s+"([^"]+)"'),
    ):
        try:
            found = re.search(pattern, (root / name).read_text(errors="replace"))
        except OSError:
            continue
        if found:
            return found.group(1)
    return None
