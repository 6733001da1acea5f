"""Hatchling hook: the content folders and the compiled probes go into the wheel.

They land in ``kvprobe/_content/``, where ``kvprobe.content`` finds them. An editable install reads
the checkout, so it gets nothing from here. The object is the same for every little-endian machine,
so the wheel stays one for all.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CONTENT = {
    "probes": ("*.bpf.c", "*.h", "*.toml"),
    "tuning": ("[a-z]*.py",),
    "playbooks": ("[a-z]*.md",),
}


class WheelContent(BuildHookInterface[Any]):
    """Adds the files to what hatchling packs; the compiled object lives in a temporary folder."""

    folder: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before hatchling packs; ``version`` is ``editable`` or ``standard``."""
        if version == "editable":
            return
        include: dict[str, str] = build_data["force_include"]
        for kind, patterns in CONTENT.items():
            for pattern in patterns:
                for path in sorted(Path(self.root, kind).glob(pattern)):
                    include[str(path)] = f"kvprobe/_content/{kind}/{path.name}"
        if shutil.which("clang") is None:
            self.app.display_warning(
                "no clang: this wheel has no compiled probes, kvprobe will compile them with bcc"
            )
            return
        self.folder = Path(tempfile.mkdtemp(prefix="kvprobe-wheel-"))
        self._compile()
        for path in self.folder.iterdir():
            include[str(path)] = f"kvprobe/_content/probes/{path.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Called after hatchling has packed."""
        if self.folder is not None:
            shutil.rmtree(self.folder)

    def _compile(self) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "KVPROBE_CONTENT"}
        ran = subprocess.run(
            [sys.executable, "-m", "kvprobe.bpf.core_object", str(self.folder)],
            cwd=self.root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode:
            self.app.abort(ran.stderr.strip().splitlines()[-1])
