"""Boot a guest and run one command in it, as root, in the host's file tree.

    python -m tests.lab.guest 6.12 -- uname -r

The guest sees the host's root read only; what it writes stays in its memory, except in its
results folder (`$KVPROBE_LAB_RESULTS`, on the host: `--results`). It has no network but its own.
The exit status is the command's; 124 when the time was up, 125 when the guest did not run.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from tests.lab import initramfs
from tests.lab.kernels import SOURCES, LabError, kernel

REPOSITORY = Path(__file__).resolve().parents[2]
QEMU = "qemu-system-x86_64"
TIMED_OUT = 124
NO_GUEST = 125

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# No look for hardware that is not there; the clock is the host's time stamp counter. A kernel that
# has failed would only hang: it ends. 6.1's check of copies trips over nvmet-tcp with huge pages.
KERNEL_COMMAND_LINE = (
    "console=ttyS0 loglevel=5 panic=-1 oops=panic hardened_usercopy=off nokaslr mitigations=off "
    "tsc=reliable clocksource=tsc no_timer_check nowatchdog audit=0 apparmor=0 selinux=0 "
    "random.trust_cpu=on 8250.nr_uarts=1 rcupdate.rcu_expedited=1 net.ifnames=0"
)


@dataclass(frozen=True)
class Machine:
    """What the guest has.

    Attributes:
        cpus: virtual processors.
        memory_mib: memory; the overlay over the host's root lives in it, too.
        pci_nvme_mib: size of a PCI NVMe device (sparse file), 0: none.
        timeout_s: the guest is stopped after so many seconds.
    """

    cpus: int = 2
    memory_mib: int = 3072
    pci_nvme_mib: int = 0
    timeout_s: float = 300


@dataclass(frozen=True)
class Outcome:
    """How a guest ended.

    Attributes:
        status: exit status of the command, or TIMED_OUT, or NO_GUEST.
        console: what the kernel said.
    """

    status: int
    console: str = field(repr=False)


def run(
    series: str,
    command: Sequence[str],
    results: Path,
    machine: Machine = Machine(),
    output: int | IO[bytes] | None = None,
) -> Outcome:
    """Boot a kernel, run a command in it, wait for its end.

    Args:
        series: one of kernels.SOURCES.
        command: program and arguments, run in this checkout.
        results: existing folder of the host, writable in the guest.
        machine: processors, memory, devices, time.
        output: where the command's stdout and stderr go; None: the caller's stdout.

    Raises:
        LabError: no QEMU, no such kernel, no busybox.
    """
    booted = kernel(series)
    if shutil.which(QEMU) is None:
        raise LabError(f"needs {QEMU}: run ./setup.sh lab")
    variables = {
        "PATH": PATH,
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "KVPROBE_LAB_RESULTS": initramfs.RESULTS_FOLDER,
        "KVPROBE_LAB_KERNEL": series,
    }
    with tempfile.TemporaryDirectory(prefix="kvprobe-guest-") as name:
        work = Path(name)
        (work / "initramfs").write_bytes(initramfs.build(booted, command, REPOSITORY, variables))
        exit_code = results / initramfs.EXIT_CODE_FILE
        exit_code.unlink(missing_ok=True)
        arguments = _qemu(booted.image, work, results, machine)
        ended = _wait(arguments, machine.timeout_s, output)
        console = (work / "console").read_text(errors="replace")
        if not ended:
            return Outcome(TIMED_OUT, console)
        if not exit_code.exists():
            return Outcome(NO_GUEST, console + (work / "qemu").read_text(errors="replace"))
        return Outcome(int(exit_code.read_text()), console)


def _qemu(image: Path, work: Path, results: Path, machine: Machine) -> list[str]:
    """The command line: emulation only, since KVM of nested machines is often broken."""
    share = "local,security_model=none,multidevs=remap"
    arguments = [
        QEMU, "-nodefaults", "-no-user-config", "-nographic", "-no-reboot",
        "-machine", "q35,hpet=off", "-accel", "tcg,thread=multi", "-cpu", "max",
        "-smp", str(machine.cpus), "-m", f"{machine.memory_mib}M",
        "-kernel", str(image), "-initrd", str(work / "initramfs"),
        "-append", KERNEL_COMMAND_LINE,
        "-serial", f"file:{work / 'console'}",
        "-chardev", "stdio,id=output,signal=off",
        "-device", "virtio-serial-pci", "-device", "virtserialport,chardev=output",
        "-fsdev", f"{share},id=host,path=/,readonly=on",
        "-device", f"virtio-9p-pci,fsdev=host,mount_tag={initramfs.HOST_TAG}",
        "-fsdev", f"{share},id=results,path={results}",
        "-device", f"virtio-9p-pci,fsdev=results,mount_tag={initramfs.RESULTS_TAG}",
    ]  # fmt: skip
    if machine.pci_nvme_mib:
        disk = work / "nvme"
        with disk.open("wb") as file:
            file.truncate(machine.pci_nvme_mib << 20)
        arguments += ["-drive", f"file={disk},if=none,id=nvme,format=raw,cache=unsafe"]
        arguments += ["-device", "nvme,drive=nvme,serial=kvprobe-lab,mdts=5,max_ioqpairs=4"]
    return arguments


def _wait(arguments: list[str], timeout_s: float, output: int | IO[bytes] | None) -> bool:
    """Run QEMU; False when the time was up. QEMU ends with this process, however that ends."""
    work = Path(arguments[arguments.index("-initrd") + 1]).parent
    with (
        (work / "qemu").open("wb") as errors,
        subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", *arguments],
            stdin=subprocess.PIPE,  # end of file there would close the output port, too
            stdout=output,
            stderr=errors,
        ) as process,
    ):
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        finally:
            process.kill()
    return True


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.lab.guest",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kernel", choices=list(SOURCES))
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS")
    parser.add_argument("--memory", type=int, default=3072, metavar="MIB")
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument("--nvme", type=int, default=0, metavar="MIB", help="a PCI NVMe device")
    parser.add_argument("--results", type=Path, help="folder that the guest writes to")
    parser.add_argument("--console", action="store_true", help="show the kernel's messages, too")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    machine = Machine(options.cpus, options.memory, options.nvme, options.timeout)
    with tempfile.TemporaryDirectory(prefix="kvprobe-results-") as scratch:
        results = (options.results or Path(scratch)).resolve()
        results.mkdir(parents=True, exist_ok=True)
        try:
            outcome = run(options.kernel, options.command, results, machine)
        except LabError as error:
            print(f"lab: {error}", file=sys.stderr)
            return NO_GUEST
    if options.console or outcome.status in (TIMED_OUT, NO_GUEST):
        print(outcome.console, file=sys.stderr)
    if outcome.status == TIMED_OUT:
        print(f"lab: stopped after {options.timeout:g} s", file=sys.stderr)
    return outcome.status


if __name__ == "__main__":
    sys.exit(main())
