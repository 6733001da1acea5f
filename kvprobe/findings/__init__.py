"""Detectors: a ledger in, symptoms out. One file per finding; its stem is the finding's slug."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvprobe import registry
from kvprobe.correlator.ledger import Ledger
from kvprobe.model import Finding

SEVERITIES = ("info", "warning", "critical")
"""Of a finding, mildest first."""


@dataclass(frozen=True)
class Detector:
    """One detector, exported as ``DETECTOR`` by its file.

    ``detect`` is pure; a healthy or an empty ledger yields nothing.
    """

    slug: str
    summary: str
    detect: Callable[[Ledger], list[Finding]]


def detectors() -> dict[str, Detector]:
    """Every detector by slug, in order of slugs.

    Raises:
        KvprobeError: a file of this package exports no ``DETECTOR``.
    """
    return registry.load(__name__, "DETECTOR", Detector)


def detect_all(ledger: Ledger) -> list[Finding]:
    """What all detectors found, gravest first, then the surest.

    Raises:
        KvprobeError: see ``detectors``.
    """
    found = [finding for each in detectors().values() for finding in each.detect(ledger)]
    return sorted(found, key=lambda f: (-SEVERITIES.index(f.severity), -f.confidence, f.slug))
