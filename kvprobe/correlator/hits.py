"""What a request had from where, as far as the engine does not say so itself."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvprobe.correlator.ledger import Account
from kvprobe.correlator.totals import times_of_increase
from kvprobe.correlator.waiting import doubt, told_hits
from kvprobe.model import Frame

COUNTED_WITHIN_NS = 200_000_000
"""How long after a first token an engine's page may still not have counted the hits before it."""


def fill_in(requests: Frame, host: Frame) -> Frame:
    """The requests with hits of 0 where the engine counted none while they waited.

    Engines count device hits on their pages and tell of them for some requests only; and what they
    tell as a sum was all in storage where they counted none in host memory. Tokens that were
    computed follow where all that was found is known.
    """
    device = requests["device_hit_tokens"]
    device = np.where((device < 0) & _none_counted(requests, host, "device_hit_tokens"), 0, device)
    storage, memory = requests["storage_hit_tokens"], requests["host_hit_tokens"]
    whole = (storage < 0) & (requests["offload_hit_tokens"] >= 0) & (memory <= 0)
    whole &= _none_counted(requests, host, "host_hit_tokens")
    requests = {
        **requests,
        "device_hit_tokens": device,
        "storage_hit_tokens": np.where(whole, requests["offload_hit_tokens"], storage),
        "host_hit_tokens": np.where(whole, 0, memory),
    }
    found = told_hits(requests)
    known = (requests["computed_tokens"] < 0) & (requests["prompt_tokens"] >= 0)
    known &= (device >= 0) & (found >= 0)
    computed = np.maximum(requests["prompt_tokens"] - device - found, 0)
    return {
        **requests,
        "computed_tokens": np.where(known, computed, requests["computed_tokens"]),
    }


def _none_counted(requests: Frame, host: Frame, total: str) -> NDArray[np.bool_]:
    """Whether the engine's page covers the time of a request and the total did not rise in it."""
    counted = times_of_increase(host, total)
    if counted is None:
        return np.zeros(len(requests["id"]), bool)
    begin, end, pages = counted
    arrival = requests["arrival_ns"] - doubt(requests)
    done = requests["first_token_ns"] + doubt(requests) + COUNTED_WITHIN_NS
    covered = (requests["arrival_ns"] >= 0) & (requests["first_token_ns"] >= 0)
    covered &= (pages[0] <= arrival) & (pages[-1] >= done)
    # Of the times of increase the first that ends after the arrival is the one that may touch it.
    next_rise = np.append(begin, np.iinfo(np.int64).max)[np.searchsorted(end, arrival)]
    none: NDArray[np.bool_] = covered & (next_rise >= done)
    return none


def split(account: Account, bytes_per_token: float | None) -> Account:
    """The account with its hits outside device memory told apart by the bytes that were read.

    What was read for it came from storage, up to the sum that the engine tells (more was read in
    vain); the rest was in host memory. Unknown stays what cannot be told.
    """
    told = account.offload_hit_tokens
    if told is None or account.storage_hit_tokens is not None or account.vague:
        return account
    read = 0 if account.restore is None else account.restore.bytes
    if read and not bytes_per_token:
        return account
    storage = min(round(read / bytes_per_token), told) if bytes_per_token else 0
    return replace(account, storage_hit_tokens=storage, host_hit_tokens=told - storage)
