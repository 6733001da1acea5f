"""The join: which request caused which I/O, where its time went, and whether it paid."""

from kvprobe.correlator.correlate import correlate
from kvprobe.correlator.ledger import CLASSES, Account, Ledger

__all__ = ["CLASSES", "Account", "Ledger", "correlate"]
