"""Who else uses the processors: a run beside other people's work says nothing and is discarded.

Time that the hypervisor steals is told apart: it steals more the busier this machine is, so it is
part of what every run meets, and alternating runs is what there is against it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

MOST_FOREIGN_SHARE = 0.08
"""Of one core, while something is measured."""
SAMPLE_SECONDS = 0.5
"""For which it must have been quiet; what begins after that is seen in the run."""
_KERNEL_THREAD = 0x00200000
"""PF_KTHREAD of include/linux/sched.h"""
_TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")


class ForeignLoad:
    """CPU time of processes outside this one's tree, since the object was made.

    Kernel threads do not count: they work for the load that is measured.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before = _foreign_seconds(), _stolen_seconds()

    def share(self) -> float:
        """Cores used by others, 1.0 is one whole core."""
        return self._share(_foreign_seconds() - self._before[0])

    def stolen(self) -> float:
        """Cores that the hypervisor did not give."""
        return self._share(_stolen_seconds() - self._before[1])

    def _share(self, seconds: float) -> float:
        return max(0.0, seconds / max(1e-3, time.monotonic() - self._began))


def wait_until_quiet(most_seconds: float) -> bool:
    """Wait until others use next to nothing; False where that did not happen in time."""
    deadline = time.monotonic() + most_seconds
    while True:
        load = ForeignLoad()
        time.sleep(SAMPLE_SECONDS)
        if load.share() <= MOST_FOREIGN_SHARE:
            return True
        if time.monotonic() >= deadline:
            return False


def family() -> frozenset[int]:
    """This process and its descendants."""
    return frozenset(_descendants({pid: parent for pid, (parent, _) in _times().items()}))


def _foreign_seconds() -> float:
    times = _times()
    ours = _descendants({pid: parent for pid, (parent, _) in times.items()})
    ticks = sum(ticks for pid, (_, ticks) in times.items() if pid not in ours)
    return ticks * _TICK_SECONDS


def _times() -> dict[int, tuple[int, int]]:
    """Parent and processor ticks of each process that is no kernel thread.

    Time of ended children is in their parent's, so that short-lived processes count.
    """
    times: dict[int, tuple[int, int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            text = Path(f"/proc/{entry}/stat").read_text()
        except OSError:
            continue  # it has ended
        # pid (comm) state ppid .. the flags are the 9th field, the times the 14th to 17th
        fields = text[text.rindex(")") + 2 :].split()
        if not int(fields[6]) & _KERNEL_THREAD:
            times[int(entry)] = (int(fields[1]), sum(map(int, fields[11:15])))
    return times


def _descendants(parents: dict[int, int]) -> set[int]:
    found, grew = {os.getpid()}, True
    while grew:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        found |= more
        grew = bool(more)
    return found


def _stolen_seconds() -> float:
    with open("/proc/stat") as file:
        return int(file.readline().split()[8]) * _TICK_SECONDS
