"""The tiny initramfs of a guest: busybox, a few modules, two shell scripts.

Its `/init` makes the guest's root from the host's: a 9p share, read only, under an overlay in
memory. Then `guest-init` runs as process 1 in that root: file systems, loopback, the command.
"""

from __future__ import annotations

import lzma
import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.lab.kernels import Kernel, LabError

HOST_TAG = "host"
RESULTS_TAG = "results"
RESULTS_FOLDER = "/run/results"
EXIT_CODE_FILE = "exit-code"
OUTPUT_PORT = "/dev/vport0p1"

NEEDED_MODULES = ("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay")

SHARE = "trans=virtio,version=9p2000.L,msize=512000"

INIT = f"""#!/bin/busybox sh
PATH=/bin
mount -t proc proc /proc
mount -t devtmpfs dev /dev
for module in $(cat /modules/order); do insmod /modules/$module; done
mount -t 9p -o ro,cache=loose,{SHARE} {HOST_TAG} /lower
mount -t tmpfs -o mode=755 memory /memory
mkdir /memory/upper /memory/work
mount -t overlay -o lowerdir=/lower,upperdir=/memory/upper,workdir=/memory/work overlay /merged
mount -t tmpfs -o mode=755 run /merged/run
mkdir /merged{RESULTS_FOLDER}
mount -t 9p -o cache=none,{SHARE} {RESULTS_TAG} /merged{RESULTS_FOLDER}
cp /guest-init /merged/run/guest-init
umount /dev /proc
exec switch_root /merged /bin/sh /run/guest-init
"""

GUEST_INIT = """#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
mount -t devpts devpts /dev/pts
mount -t tmpfs shm /dev/shm
mount -t cgroup2 cgroup /sys/fs/cgroup
mount -t debugfs debug /sys/kernel/debug
mount -t tracefs trace /sys/kernel/tracing
mount -t bpf bpf /sys/fs/bpf
ln -sf /proc/self/fd /dev/fd
mkdir -p /usr/lib/modules
[ -e /lib ] || ln -s usr/lib /lib
ln -sfn {modules} /lib/modules/{release}
modprobe configfs
mount -t configfs config /sys/kernel/config
hostname {hostname}
ip link set lo up
ulimit -l unlimited
sysctl -q kernel.bpf_stats_enabled=1
cd {folder}
{{ {environment} {command}; echo $? >{results}/{exit_code_file}; }} </dev/null 2>&1 | cat >{port}
sync
exec busybox poweroff -f
"""


def build(kernel: Kernel, command: Sequence[str], folder: Path, variables: dict[str, str]) -> bytes:
    """The initramfs (cpio, newc) that runs a command in a folder of the host's root.

    Raises:
        LabError: no static busybox.
    """
    busybox = Path("/usr/bin/busybox")
    if not busybox.exists():
        raise LabError("needs busybox: run ./setup.sh lab")
    if b"ld-linux" in busybox.read_bytes()[:4096]:
        raise LabError(f"{busybox} is not static: apt-get install busybox-static")
    archive = _Archive()
    for name in ("bin", "proc", "dev", "lower", "memory", "merged", "modules"):
        archive.folder(name)
    archive.file("bin/busybox", busybox.read_bytes(), 0o755)
    for applet in ("sh", "mount", "umount", "cat", "cp", "mkdir", "insmod", "switch_root"):
        archive.link(f"bin/{applet}", "busybox")
    order = []
    for module in _load_order(kernel):
        name = module.name.removesuffix(".xz")
        content = module.read_bytes()
        archive.file(
            f"modules/{name}", lzma.decompress(content) if module.suffix == ".xz" else content
        )
        order.append(name)
    archive.file("modules/order", "\n".join(order).encode())
    archive.file("init", INIT.encode(), 0o755)
    archive.file("guest-init", _guest_init(kernel, command, folder, variables).encode(), 0o755)
    return archive.finish()


def _guest_init(
    kernel: Kernel, command: Sequence[str], folder: Path, variables: dict[str, str]
) -> str:
    environment = ["env", "-i", *(f"{key}={value}" for key, value in variables.items())]
    return GUEST_INIT.format(
        modules=shlex.quote(str(kernel.modules)),
        release=kernel.release,
        hostname=f"lab-{kernel.series.replace('.', '-')}",
        folder=shlex.quote(str(folder)),
        environment=shlex.join(environment),
        command=shlex.join(command),
        results=RESULTS_FOLDER,
        exit_code_file=EXIT_CODE_FILE,
        port=OUTPUT_PORT,
    )


def _load_order(kernel: Kernel) -> list[Path]:
    """Module files, dependencies first; what is built in needs none."""
    files: dict[str, Path] = {}
    needs: dict[str, list[str]] = {}
    for line in (kernel.modules / "modules.dep").read_text().splitlines():
        path, _, dependencies = line.partition(":")
        files[_name(path)] = kernel.modules / path
        needs[_name(path)] = [_name(word) for word in dependencies.split()]
    builtin = {_name(p) for p in (kernel.modules / "modules.builtin").read_text().split()}
    order: list[str] = []

    def add(name: str) -> None:
        if name in builtin or name in order:
            return
        if name not in files:
            raise LabError(f"kernel {kernel.release} has no module {name}")
        for dependency in needs[name]:
            add(dependency)
        order.append(name)

    for name in NEEDED_MODULES:
        add(name)
    return [files[name] for name in order]


def _name(path: str) -> str:
    return Path(path).name.split(".ko", 1)[0].replace("-", "_")


class _Archive:
    """A cpio archive of format newc (Linux, Documentation/driver-api/early-userspace)."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._inode = 0

    def folder(self, name: str) -> None:
        self._entry(name, b"", 0o040755)

    def file(self, name: str, content: bytes, mode: int = 0o644) -> None:
        self._entry(name, content, 0o100000 | mode)

    def link(self, name: str, target: str) -> None:
        self._entry(name, os.fsencode(target), 0o120777)

    def finish(self) -> bytes:
        self._entry("TRAILER!!!", b"", 0)
        return b"".join(self._parts)

    def _entry(self, name: str, content: bytes, mode: int) -> None:
        self._inode += 1
        path = os.fsencode(name) + b"\0"
        fields = [self._inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(path), 0]
        header = b"070701" + b"".join(b"%08X" % field for field in fields)
        self._parts.extend(_padded(header + path))
        self._parts.extend(_padded(content))


def _padded(data: bytes) -> Iterator[bytes]:
    yield data
    yield b"\0" * (-len(data) % 4)
