"""Facts of the machine without which a figure means nothing."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

import kvprobe

_CHECKOUT = Path(__file__).parents[2]
_TOOLS = {
    "fio": ("fio", "--version"),
    "bpftrace": ("bpftrace", "--version"),
    "bcc": ("dpkg-query", "-W", "-f=${Version}", "python3-bpfcc"),
    "libbpf": ("dpkg-query", "-W", "-f=${Version}", "libbpf1"),
}


def facts() -> dict[str, Any]:
    """Date, kernel, processor, load and versions, as of now."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "kernel": platform.release(),
        "cpu": f"{os.cpu_count()} x {_processor()}",
        "memory": f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB",
        "load": f"{os.getloadavg()[0]:.2f} (1 minute, at the start)",
        "versions": {
            "kvprobe": f"{kvprobe.__version__} ({_commit()})",
            "python": platform.python_version(),
            "numpy": np.__version__,
            **{name: _first_number(said(*command)) for name, command in _TOOLS.items()},
        },
    }


def said(*command: str) -> str:
    """The last line a command prints, or an empty text where it is absent or fails."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True, cwd=_CHECKOUT
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""


def _commit() -> str:
    trusted = f"safe.directory={_CHECKOUT}"
    return said("git", "-c", trusted, "rev-parse", "--short=10", "HEAD") or "no checkout"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            virtual = "hypervisor" in Path("/proc/cpuinfo").read_text()
            return line.split(":", 1)[1].strip() + (", virtual" if virtual else "")
    return platform.machine()


def _first_number(text: str) -> str:
    found = re.search(r"\d+(\.\d+)+\S*", text)
    return found.group(0) if found else "absent"
