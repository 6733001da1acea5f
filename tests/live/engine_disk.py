"""A place for an engine's files on a disk that can be slowed down."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvprobe.workload.scratch import Scratch, scratch_filesystem

LOOP_BYTES = 4 << 30
_BLOCK = Path("/sys/dev/block")


@contextmanager
def disk_folder() -> Iterator[Scratch]:
    """An empty folder on a disk of this machine, or else on a loop device.

    The disk itself where there is one: a limit on a loop device's reads holds on average only,
    since its own reads of the disk below wait behind whatever is written there.
    """
    folder = Path(tempfile.mkdtemp(prefix="kvprobe-live-"))
    try:
        found = _whole_disk(os.stat(folder).st_dev)
        if found is None:
            with scratch_filesystem(LOOP_BYTES) as made:
                yield made
        else:
            yield Scratch(str(folder), *found)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _whole_disk(number: int) -> tuple[str, int] | None:
    """Name and kernel dev_t of the disk that a file system's device is, or is a part of."""
    device = _BLOCK / f"{os.major(number)}:{os.minor(number)}"
    if not device.exists():
        return None  # overlay, tmpfs
    device = device.resolve()
    if (device / "partition").exists():
        device = device.parent
    major, minor = map(int, (device / "dev").read_text(encoding="ascii").split(":"))
    return device.name, major << 20 | minor
