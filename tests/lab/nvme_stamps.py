"""The times inside a command: in order, and there wherever the kernel lets them be known."""

from __future__ import annotations

import numpy as np

from kvprobe.model import Frame
from kvprobe.schema import UNKNOWN, NvmeTransport

SENT = (NvmeTransport.TCP, NvmeTransport.RDMA)
"""Transports that send; a PCI device reads its commands from memory."""
FEW = 0.02
"""Share of commands of which a stamp may be unknown: the kernel runs no function probe where it
interrupts another program, and nvme-tcp knows of arrivals per queue only."""


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
        known = sent != UNKNOWN
        assert np.mean(~known) <= FEW, f"{transport.name}: {np.mean(known):.1%} known to be sent"
        assert (setup[known] <= sent[known]).all(), f"{transport.name}: sent before it was made"
        came = arrived != UNKNOWN
        assert np.mean(~came) <= FEW, f"{transport.name}: {np.mean(came):.1%} arrivals known"
        assert (sent[came] <= arrived[came]).all(), f"{transport.name}: answered before sent"
        assert (arrived[came] <= done[came]).all(), f"{transport.name}: arrived after its end"
