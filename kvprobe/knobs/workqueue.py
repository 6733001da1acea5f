"""On which CPUs the work of NVMe/TCP runs (``/sys/devices/virtual/workqueue``)."""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.knobs import Family, Knob, KnobKind, Reach, Setting, Subjects, setting
from kvprobe.sources.devices import read_text

CPUS = Knob(
    "nvme_tcp_wq.cpumask",
    Family.QUEUE_DEPTH,
    "mask",
    "CPUs that may do the work of NVMe/TCP connections",
    Reach.LIVE,
    default="all CPUs",
    allowed="a mask of CPUs, from Linux 6.10 on",
    ignored="without nvme_tcp.wq_unbound the work stays on the CPU of its queue",
    risk="too few CPUs bound the throughput of all queues",
)


def _read(subjects: Subjects) -> Iterator[Setting]:
    source = subjects.roots.sysfs / "devices/virtual/workqueue/nvme_tcp_wq/cpumask"
    if subjects.host and source.exists():
        yield setting(CPUS, "host", read_text(source) or None, source)


KIND = KnobKind("workqueue", "CPUs for the work of NVMe/TCP", (CPUS,), _read)
