"""What the verbs that trace this machine share: options, checks, and opening the source."""

from __future__ import annotations

import os
import secrets
import time
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from kvprobe import __version__
from kvprobe.capture.manifest import Clock, Host, Manifest
from kvprobe.commands._listening import Listening, add_engine_options
from kvprobe.errors import ExitCode, KvprobeError
from kvprobe.model import DeviceFacts, Filters, Missing
from kvprobe.sources.live import LiveSource

LOADERS = ("auto", "core", "bcc")


def add_source_options(parser: ArgumentParser) -> None:
    """Add what says whom to trace, and how."""
    whom = parser.add_argument_group("whom to trace (default: everything on this machine)")
    whom.add_argument(
        "--pid",
        type=whole_number("a process id", 1),
        nargs="+",
        default=[],
        metavar="PID",
        help="these processes and their children",
    )
    whom.add_argument("--root", metavar="DIR", help="files below this folder")
    whom.add_argument("--device", metavar="NAME", help="this block device, such as nvme0n1")
    whom.add_argument(
        "--min-latency-us",
        type=whole_number("a number of microseconds", 0),
        default=0,
        metavar="N",
        help="leave out block requests that took less (aggregates stay complete)",
    )
    whom.add_argument(
        "--keep-one-in",
        type=whole_number("a number from 1 on", 1),
        default=1,
        metavar="N",
        help="keep one in N block requests (aggregates stay complete)",
    )
    whom.add_argument(
        "--budget",
        type=_percent,
        metavar="PERCENT",
        help="thin block rows where kvprobe would use more of a core than this for each 100,000 "
        "requests a second (aggregates stay complete; default: never thin)",
    )
    add_engine_options(parser)
    parser.add_argument(
        "--loader", choices=LOADERS, default="auto", help="how the BPF programs get in"
    )


def whole_number(what: str, least: int) -> Callable[[str], int]:
    """An option type: a whole number from ``least`` on."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) < 2**62:
            raise ArgumentTypeError(f"{text!r} is not {what}")
        return int(text)

    return parse


def _percent(text: str) -> float:
    try:
        percent = float(text)
    except ValueError:
        percent = 0.0
    if not 0 < percent <= 100:
        raise ArgumentTypeError(f"{text!r} is not a percentage")
    return percent


def require_root(verb: str) -> None:
    """Refuse to go on without the rights that tracing needs.

    Raises:
        KvprobeError: not root (exit 3).
    """
    if os.geteuid() != 0:
        raise KvprobeError(
            f"{verb} needs root to load BPF programs",
            f"sudo kvprobe {verb} ...",
            ExitCode.UNSUPPORTED,
        )


def filters_of(options: Namespace, more_tgids: Sequence[int] = ()) -> Filters:
    """What the kernel is to keep.

    Raises:
        KvprobeError: a process, folder or device that does not exist.
    """
    return Filters(
        tgids=(*map(_process, options.pid), *more_tgids),
        device=None if options.device is None else _device(options.device).device,
        root=None if options.root is None else _folder(options.root),
        min_latency_ns=options.min_latency_us * 1000,
        keep_one_in=options.keep_one_in,
    )


def open_live(
    filters: Filters,
    loader: str,
    heard: Listening,
    budget_share: float | None = None,
) -> tuple[LiveSource, Manifest]:
    """Attach to the running kernel.

    Args:
        filters: what the kernel keeps.
        loader: one of ``LOADERS``.
        heard: the engine and its signals; the source closes them.
        budget_share: CPU that kvprobe may use, see ``kvprobe.bpf.governor``; None: unbounded.

    Returns:
        The source, and the facts as recording begins.

    Raises:
        KvprobeError: this machine cannot be traced (exit 3).
    """
    from kvprobe import knobs
    from kvprobe.bpf.session import open_session
    from kvprobe.clock import sample_clocks
    from kvprobe.sources.gpu import GpuSampler
    from kvprobe.sources.host import HostSampler
    from kvprobe.sources.path_watch import PathWatch

    watch = PathWatch()
    settings = [knobs.as_row(each) for each in knobs.read_all(knobs.of_host())]
    session = open_session(None, filters, loader, budget_share=budget_share)
    try:
        clock = sample_clocks()
        manifest = Manifest(
            kvprobe=__version__,
            capture_id=secrets.token_hex(8),
            start_ns=time.monotonic_ns(),
            end_ns=time.monotonic_ns(),
            clock=Clock(clock.offset_ns, uncertainty_ns=clock.uncertainty_ns),
            host=host_facts(),
            loader=session.loader,
            probes=tuple(session.attached),
            missing=(*session.missing, *_slower(session.loader_why)),
            filters=filters,
            budget_share=budget_share,
            engine_name=heard.engine_name,
            engine=heard.facts,
            devices=watch.devices,
            nvme_paths=watch.paths,
        )
        gpus = GpuSampler()
        opening = {"knobs": settings}
        source = LiveSource(
            session, heard.signal, HostSampler(), watch, gpus, opening, engine=heard.facts
        )
        gpus.start()
        return source, manifest
    except BaseException:
        session.close()
        raise


def _slower(why: str) -> tuple[Missing, ...]:
    """That the cheap loader does not work here, where another one had to be taken."""
    if not why:
        return ()
    return (Missing("core loader", why, "probes cost more, rows are the same", "kvprobe doctor"),)


def host_facts() -> Host:
    """This machine in a few words."""
    system = os.uname()
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot_id = None
    return Host(
        hostname=system.nodename,
        kernel=system.release,
        machine=system.machine,
        cpus=os.cpu_count(),
        memory_bytes=pages * page_bytes if pages > 0 and page_bytes > 0 else None,
        boot_id=boot_id,
    )


def _process(pid: int) -> int:
    """The process that ``pid`` is, or is a thread of."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise KvprobeError(f"no process {pid}", "pgrep -f NAME finds process ids") from error
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return int(fields.get("Tgid", str(pid)))


def _folder(root: str) -> str:
    try:
        path = Path(root).resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise KvprobeError(f"no folder {root}", "--root names a folder that exists") from error
    if not path.is_dir():
        hint = "--device names a disk" if path.is_block_device() else "--root names a folder"
        raise KvprobeError(f"{root} is not a folder", hint)
    return str(path)


def _device(name: str) -> DeviceFacts:
    from kvprobe.sources.devices import SYSFS, facts_of, mounts, no_such_disk

    wanted = name.removeprefix("/dev/")
    found = None if "/" in wanted else facts_of(wanted, SYSFS, mounts())
    if found is None:
        raise no_such_disk(name)
    return found
