"""An engine's own counters, read from its Prometheus page: the truth for kvprobe's figures."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Counters:
    """All samples of one look at a page."""

    samples: dict[tuple[str, Labels], float]

    @classmethod
    def read(cls, url: str) -> Counters:
        """Look at the page at ``url``."""
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            text = answer.read().decode("utf-8")
        return cls(
            {
                (sample.name, tuple(sorted(sample.labels.items()))): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }
        )

    def total(self, name: str, **labels: str) -> float:
        """Sum of a metric's samples that have these labels; 0 where there is none."""
        wanted = set(labels.items())
        return sum(
            value
            for (each, have), value in self.samples.items()
            if each == name and wanted <= set(have)
        )


def settled(url: str, of: Callable[[Counters], float], seconds: float = 20.0) -> Counters:
    """The counters once ``of`` has been the same for three looks, a third of a second apart."""
    deadline = time.monotonic() + seconds
    last, equal = Counters.read(url), 0
    while equal < 2 and time.monotonic() < deadline:
        time.sleep(0.33)
        now = Counters.read(url)
        equal = equal + 1 if of(now) == of(last) else 0
        last = now
    return last
