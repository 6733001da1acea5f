"""A controller: queues, and what happens when it does not answer (``/sys/class/nvme/NAME``)."""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.knobs import Family, Knob, KnobKind, Reach, Setting, Subjects, setting
from kvprobe.sources.devices import read_text
from kvprobe.sources.nvme import NvmeController, controller_of

_AGAIN = "disconnect, and connect with the options of before"

QUEUE_SIZE = Knob(
    "queue_size",
    Family.QUEUE_DEPTH,
    "entries",
    "entries of each I/O queue",
    Reach.RECONNECT,
    default="128",
    allowed="16 .. 1024, at most what the target allows (RDMA: 128, later 256)",
    ignored="where the target allows less the driver takes less and only logs it",
    risk="deeper queues cost memory on the target and latency when full",
    undo=_AGAIN,
)
IO_QUEUES = Knob(
    "io_queues",
    Family.QUEUE_DEPTH,
    "queues",
    "queue pairs for I/O; over TCP each is one connection",
    Reach.RECONNECT,
    default="one for each CPU that is online",
    allowed="1 .. CPUs online, at most what the target grants",
    ignored="where the target grants fewer the driver takes fewer",
    risk="many hosts with many queues exhaust the target; connecting fails where CPUs are offline",
    undo=_AGAIN,
)
_TIMES = (
    Knob(
        "ctrl_loss_tmo",
        Family.QUEUE_DEPTH,
        "s",
        "how long the driver tries to connect again before the path is removed",
        Reach.LIVE,
        default="600",
        allowed="0 and more, -1 for ever",
        risk="a short one removes the path, with its settings, during a short outage",
    ),
    Knob(
        "fast_io_fail_tmo",
        Family.QUEUE_DEPTH,
        "s",
        "after this, I/O of a lost path fails instead of waiting",
        Reach.LIVE,
        default="off",
        allowed="0 .. ctrl_loss_tmo, -1 off",
        risk="without another path the engine sees errors",
    ),
    Knob(
        "reconnect_delay",
        Family.QUEUE_DEPTH,
        "s",
        "pause between two tries to connect again",
        Reach.LIVE,
        default="10",
        allowed="1 .. ctrl_loss_tmo",
    ),
    Knob(
        "kato",
        Family.QUEUE_DEPTH,
        "s",
        "keep-alive: a silent path is noticed after about this time",
        Reach.RECONNECT,
        default="5",
        risk="a long one hides dead paths",
        undo=_AGAIN,
    ),
)


def _read(subjects: Subjects) -> Iterator[Setting]:
    for name in subjects.controllers:
        folder = subjects.roots.sysfs / "class/nvme" / name
        found = controller_of(folder)
        reach = _reach(found)
        if found.queue_size is not None:
            size = str(found.queue_size)
            note = "as --queue-size has it: the file counts from zero"
            yield setting(QUEUE_SIZE, name, size, folder / "sqsize", note, reach)
        if found.io_queues is not None:
            queues = str(found.io_queues)
            note = "without the admin queue, which the file counts too"
            yield setting(IO_QUEUES, name, queues, folder / "queue_count", note, reach)
        for knob in _TIMES:
            source = folder / knob.name
            if source.exists():
                yield setting(knob, name, read_text(source) or None, source)


def _reach(found: NvmeController) -> Reach:
    """A local device gets its queues from parameters of its module."""
    return Reach.MODULE_RELOAD if found.transport == "pcie" else Reach.RECONNECT


KIND = KnobKind("nvme_controller", "an NVMe controller", (QUEUE_SIZE, IO_QUEUES, *_TIMES), _read)
