"""Record a window, keep it in one file, read it back, redact it."""

from kvprobe.capture.manifest import Manifest
from kvprobe.capture.tables import FixedTables, Tables

__all__ = ["FixedTables", "Manifest", "Tables"]
