"""A GPU whose clocks were held back while it computed prompts: why a prefill is slow."""

from __future__ import annotations

from kvprobe.correlator.gpu.ledger import Throttling
from kvprobe.correlator.ledger import Ledger
from kvprobe.findings import Detector
from kvprobe.findings._weigh import confidence
from kvprobe.model import Evidence, Finding

HELD_SHARE = 0.2
"""Of the readings during prefills."""
CERTAIN_HELD_SHARE = 0.8
MIN_READINGS = 10
MIN_LOSS = 0.05
"""Of the clock, or of the prefill's time: a power cap that costs less is how a GPU is run."""
COSTLY_LOSS = 0.15


def _detect(ledger: Ledger) -> list[Finding]:
    found = []
    for gpu in ledger.gpus:
        held = gpu.throttling
        if held is None or held.readings < MIN_READINGS or gpu.follows_prefills is False:
            continue
        share = held.held / held.readings
        loss = _clock_loss(held, gpu.facts.sm_clock_hz)
        longer = None if held.slowdown is None else 1 - 1 / held.slowdown
        cost = max((each for each in (loss, longer) if each is not None), default=0.0)
        if share < HELD_SHARE or cost < MIN_LOSS:
            continue
        # A reason is none of the duration unless prefills were in fact slower.
        proven = longer is not None and longer >= MIN_LOSS
        found.append(
            Finding(
                slug="gpu_throttled",
                severity="warning" if proven or cost >= COSTLY_LOSS else "info",
                confidence=confidence(held.readings, share, HELD_SHARE, CERTAIN_HELD_SHARE),
                subject=f"GPU {gpu.facts.index}",
                evidence=(
                    Evidence("share of readings held back", share, "share", held.readings),
                    *(
                        Evidence(f"readings with {name.replace('_', ' ')}", n, "", held.readings)
                        for name, n in held.reasons.items()
                    ),
                    Evidence("SM clock when held back, median", _mhz(held), "MHz", held.held),
                    Evidence("share of the clock lost", loss, "share", held.held),
                    Evidence(
                        "prefills held back against others, times as long",
                        held.slowdown,
                        "",
                        min(held.prefills_held, held.prefills_free),
                    ),
                ),
                would_disprove="prefills of the same size as slow when no reason is on",
            )
        )
    return found


def _clock_loss(held: Throttling, most_hz: int | None) -> float | None:
    """Against the clock without a reason, or where it always had one the highest there is."""
    full = held.clock_free_hz or most_hz
    return 1 - held.clock_held_hz / full if held.clock_held_hz and full else None


def _mhz(held: Throttling) -> float | None:
    return held.clock_held_hz / 1e6 if held.clock_held_hz else None


DETECTOR = Detector("gpu_throttled", "clocks were held back during prefills", _detect)
