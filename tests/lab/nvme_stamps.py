"""The times inside a command: in order, and there wherever the kernel lets them be known."""

from __future__ import annotations

import numpy as np

from kvprobe.model import Frame
from kvprobe.schema import UNKNOWN, NvmeTransport

SENT = (NvmeTransport.TCP, NvmeTransport.RDMA)
"""Transports that send; a PCI device reads its commands from memory."""
FEW = 0.02
"""Share of nvme-tcp commands whose arrival may be unknown: it is known per queue only."""


def check_stamps(nvme: Frame) -> None:
    """Set-up, sending, arrival and completion of every command that succeeded.

    Raises:
        AssertionError: a stamp is missing, or out of order.
    """
    good = nvme["status"] == 0
    for transport in NvmeTransport:
        mine = good & (nvme["transport"] == transport)
        if not mine.any():
            continue
        setup, sent, arrived, done = (
            nvme[name][mine] for name in ("setup_ns", "sent_ns", "arrived_ns", "done_ns")
        )
        assert (setup <= done).all(), f"{transport.name}: done before it was made"
        if transport not in SENT:
            assert (sent == UNKNOWN).all(), f"{transport.name} sends nothing"
            assert (arrived == UNKNOWN).all(), f"{transport.name} receives nothing"
            continue
        unsent = int((sent == UNKNOWN).sum())
        assert not unsent, f"{transport.name}: {unsent} of {len(sent)} commands never sent"
        assert (setup <= sent).all(), f"{transport.name}: sent before it was made"
        known = arrived != UNKNOWN
        least = 1.0 if transport is NvmeTransport.RDMA else 1.0 - FEW
        assert np.mean(known) >= least, f"{transport.name}: {np.mean(known):.1%} arrivals known"
        assert (sent[known] <= arrived[known]).all(), f"{transport.name}: answered before sent"
        assert (arrived[known] <= done[known]).all(), f"{transport.name}: arrived after its end"
