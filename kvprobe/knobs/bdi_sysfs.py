"""Read-ahead of a file system that no single disk serves (``/sys/class/bdi/MAJOR:MINOR``)."""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.knobs import Family, Knob, KnobKind, Reach, Setting, Subjects, setting
from kvprobe.sources.devices import read_text

MOUNT_AHEAD = Knob(
    "bdi_read_ahead_kb",
    Family.PREFETCH,
    "KiB",
    "how far buffered reads of a file in order are read ahead",
    Reach.NEW_OPENS,
    default="128 (NFS, from Linux 5.4)",
    allowed="0 and more, rounded down to pages",
    ignored="direct I/O and files that are open take no notice; a new mount has the default",
    risk="much is read for nothing where reads are scattered; 0 reads page by page",
)


def _read(subjects: Subjects) -> Iterator[Setting]:
    for device, mount in {mount.device: mount for mount in subjects.mounts}.items():
        if device >> 20 != 0:
            continue  # a disk: its queue has the same value
        number = f"{device >> 20}:{device & 0xFFFFF}"
        source = subjects.roots.sysfs / "class/bdi" / number / "read_ahead_kb"
        if source.exists():
            value = read_text(source) or None
            yield setting(MOUNT_AHEAD, mount.point, value, source, mount.filesystem)


KIND = KnobKind("bdi_sysfs", "read-ahead of a network file system", (MOUNT_AHEAD,), _read)
