"""Parameters of the NVMe modules that are loaded (``/sys/module/MODULE/parameters``)."""

from __future__ import annotations

from collections.abc import Iterator

from kvprobe.knobs import Family, Knob, KnobKind, Reach, Setting, Subjects, setting
from kvprobe.sources.devices import read_text

_UNLOAD = "load the module with the value of before"
HOST = "host"


def _depth(
    name: str,
    meaning: str,
    reach: Reach = Reach.MODULE_RELOAD,
    default: str = "",
    allowed: str = "",
    unit: str = "",
    risk: str = "",
    ignored: str = "",
) -> Knob:
    undo = "write back the value that was read" if reach is Reach.LIVE else _UNLOAD
    return Knob(
        name, Family.QUEUE_DEPTH, unit, meaning, reach, default, allowed, ignored, risk, undo
    )


_KNOBS = (
    _depth(
        "nvme_core.multipath",
        "whether the driver joins the paths to one namespace (native multipath)",
        default="Y",
        allowed="Y N",
        risk="without it a namespace has a disk for each path; GPUDirect's P2PDMA needs N",
    ),
    _depth(
        "nvme_core.iopolicy",
        "path policy of subsystems that appear from now on",
        Reach.LIVE,
        default="numa",
        allowed="numa round-robin, from Linux 6.11 queue-depth",
        ignored="subsystems that are there already take no notice",
    ),
    _depth(
        "nvme_core.io_timeout",
        "a command without an answer is given up after this",
        Reach.RECONNECT,
        default="30",
        unit="s",
        risk="a short one takes a busy target for a dead one",
        ignored="controllers that are connected take no notice",
    ),
    _depth(
        "nvme_core.max_retries",
        "how often a failed command is sent again",
        Reach.LIVE,
        default="5",
        unit="commands",
    ),
    _depth(
        "nvme.io_queue_depth",
        "entries of each queue of local devices",
        default="1024",
        allowed="2 .. 4095",
        unit="entries",
        ignored="devices that are there already take no notice until they are reset",
    ),
    _depth(
        "nvme.poll_queues",
        "queues of local devices whose completions are polled for",
        default="0",
        allowed="0 .. CPUs",
        unit="queues",
        risk="taken from the other queues; polling takes a CPU",
    ),
    _depth(
        "nvme.write_queues",
        "queues of local devices for writes only",
        default="0",
        allowed="0 .. CPUs",
        unit="queues",
        risk="taken from those of reads",
    ),
    _depth(
        "nvme_tcp.so_priority",
        "socket priority of connections; network cards map it to a traffic class",
        Reach.RECONNECT,
        default="0",
        ignored="connections that exist take no notice",
    ),
    _depth(
        "nvme_tcp.wq_unbound",
        "whether the transport's work may move between CPUs",
        default="N",
        allowed="Y N (from Linux 6.10)",
        risk="bound work waits behind an engine that is pinned to the same CPU",
        ignored="a write succeeds, but the module looks when it is loaded",
    ),
    _depth(
        "nvme_tcp.tls_handshake_timeout",
        "how long a TLS handshake may take",
        Reach.RECONNECT,
        default="10",
        unit="s",
    ),
    _depth(
        "nvme_rdma.register_always",
        "whether memory is registered for small transfers too",
        default="Y",
        allowed="Y N",
    ),
)


def _read(subjects: Subjects) -> Iterator[Setting]:
    if not subjects.host:
        return
    for knob in KIND.knobs:
        module, _, name = knob.name.partition(".")
        source = subjects.roots.sysfs / "module" / module / "parameters" / name
        if source.exists():
            yield setting(knob, HOST, read_text(source) or None, source)


KIND = KnobKind("module_parameter", "parameters of the NVMe modules", _KNOBS, _read)
