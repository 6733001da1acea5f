"""Copy what kvprobe reads of a machine's sysfs and procfs into one small JSON file.

    python3 tests/knobs/copy_sysfs.py FILE

``files`` has the text of each file (null: there, but it cannot be read), ``links`` where each link
leads. ``tests/knobs/trees.py`` makes a tree of it again. Of the mounts only those of disks.
"""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SYS = Path("/sys")
DEVICE_FILES = ("dev", "size", "hidden", "partition", "uuid", "nguid", "eui", "nsid", "ana_state")
FOLDERS = ("queue", "multipath", "slaves", "dm", "md", "loop", "mq", "device")
CONTROLLER_FILES = (
    "address", "cntlid", "ctrl_loss_tmo", "fast_io_fail_tmo", "kato", "numa_node", "queue_count",
    "reconnect_delay", "sqsize", "state", "subsysnqn", "transport",
)  # fmt: skip
MODULES = ("nvme", "nvme_core", "nvme_tcp", "nvme_rdma")
SYSCTLS = (
    "core/busy_poll", "core/busy_read", "core/rmem_max", "core/wmem_max",
    "ipv4/tcp_rmem", "ipv4/tcp_wmem",
)  # fmt: skip
ON_A_DISK = re.compile(r" - \S+ /dev/")
SKIPPED = ("ram", "nbd", "sr", "fd", "zram")


def entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def disk(folder: Path) -> Iterator[Path]:
    """What is read of one disk, given its real folder."""
    yield from (folder / name for name in DEVICE_FILES)
    for name in FOLDERS:
        if (folder / name).is_symlink():
            yield folder / name
        else:
            yield from entries(folder / name)
    for queue in entries(folder / "mq"):
        yield from (queue / name for name in ("cpu_list", "nr_tags", "nr_reserved_tags"))
        yield SYS / "kernel/debug/block" / folder.name / f"hctx{queue.name}" / "type"
    for part in entries(folder):
        if (part / "partition").exists():
            yield from (part / name for name in DEVICE_FILES)


def sources() -> Iterator[Path]:
    for link in entries(SYS / "block"):
        if link.name.startswith(SKIPPED) or (link / "size").read_text() == "0\n":
            continue
        yield link
        yield from disk(link.resolve())
    for link in entries(SYS / "dev/block"):
        yield link
    for link in entries(SYS / "class/nvme"):
        yield link
        yield from (link.resolve() / name for name in CONTROLLER_FILES)
    for link in entries(SYS / "class/nvme-subsystem"):
        yield link
        yield from (link.resolve() / name for name in ("subsysnqn", "iopolicy"))
        yield from (e for e in entries(link.resolve()) if e.is_symlink())
    for module in MODULES:
        yield from entries(SYS / "module" / module / "parameters")
    for folder in entries(SYS / "fs/ext4"):
        yield folder / "inode_readahead_blks"
    yield from (Path("/proc/sys/net") / name for name in SYSCTLS)
    yield Path("/proc/diskstats")
    yield Path("/proc/self/mountinfo")


def copied(paths: Iterator[Path]) -> dict[str, dict[str, str | None]]:
    files: dict[str, str | None] = {}
    links: dict[str, str | None] = {}
    for path in paths:
        if path.is_symlink():
            links[str(path)] = str(path.resolve())
        elif path.is_file():
            try:
                files[str(path)] = path.read_text()
            except OSError:
                files[str(path)] = None
    table = files.get("/proc/self/mountinfo") or ""
    on_disks = (line for line in table.splitlines(True) if ON_A_DISK.search(line))
    files["/proc/self/mountinfo"] = "".join(on_disks)  # the rest says more of the host than is used
    kept: dict[str, str | None] = {
        name: to for name, to in links.items() if to and os.path.exists(to)
    }
    return {"files": files, "links": kept}


def main(out: str) -> None:
    tree = copied(sources())
    Path(out).write_text(json.dumps(tree, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
