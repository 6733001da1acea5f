"""What a request had from where, as far as the engine does not say so itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvprobe.correlator.ledger import Account
from kvprobe.correlator.totals import times_of_increase
from kvprobe.correlator.waiting import doubt, told_hits
from kvprobe.model import Frame

COUNTED_WITHIN_NS = 200_000_000
"""How long after a first token an engine's page may still not have counted the hits before it."""


def fill_in(requests: Frame, host: Frame) -> Frame:
    """The requests with device hits of 0 where the engine counted none while they waited.

    Engines count device hits on their pages and tell of them for some requests only. Tokens that
    were computed follow where all that was found is known.
    """
    counted = times_of_increase(host, "device_hit_tokens")
    if counted is None:
        return requests
    begin, end, pages = counted
    arrival = requests["arrival_ns"] - doubt(requests)
    done = requests["first_token_ns"] + doubt(requests) + COUNTED_WITHIN_NS
    covered = (requests["arrival_ns"] >= 0) & (requests["first_token_ns"] >= 0)
    covered &= (pages[0] <= arrival) & (pages[-1] >= done)
    # Of the times of increase the first that ends after the arrival is the one that may touch it.
    next_rise = np.append(begin, np.iinfo(np.int64).max)[np.searchsorted(end, arrival)]
    none = covered & (requests["device_hit_tokens"] < 0) & (next_rise >= done)
    hits = np.where(none, 0, requests["device_hit_tokens"])
    found = told_hits(requests)
    known = (requests["computed_tokens"] < 0) & (requests["prompt_tokens"] >= 0)
    known &= (hits >= 0) & (found >= 0)
    computed = np.maximum(requests["prompt_tokens"] - hits - found, 0)
    return {
        **requests,
        "device_hit_tokens": hits,
        "computed_tokens": np.where(known, computed, requests["computed_tokens"]),
    }


def split(account: Account, bytes_per_token: float | None) -> Account:
    """The account with its hits outside device memory told apart by the bytes that were read.

    What was read for it came from storage, up to the sum that the engine tells (more was read in
    vain); the rest was in host memory. Unknown stays what cannot be told.
    """
    told = account.offload_hit_tokens
    if told is None or account.storage_hit_tokens is not None:
        return account
    read = 0 if account.restore is None else account.restore.bytes
    if read and not bytes_per_token:
        return account
    storage = min(round(read / bytes_per_token), told) if bytes_per_token else 0
    return replace(account, storage_hit_tokens=storage, host_hit_tokens=told - storage)
