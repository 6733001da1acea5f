"""Write a result to a file a user named: whole or not at all."""

from __future__ import annotations

import sys
from pathlib import Path

from kvprobe.errors import KvprobeError


def write_whole(output: str, text: str, what: str) -> None:
    """Write ``text`` beside ``output``, then put it in its place.

    Raises:
        KvprobeError: the file cannot be written; nothing is left behind.
    """
    path = Path(output)
    beside = path.with_name(f".{path.name}.tmp")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise KvprobeError(
            f"cannot write {output}: {error.strerror}", "name a writable place with --output"
        ) from error
    print(f"kvprobe: {what} written to {output}", file=sys.stderr)
