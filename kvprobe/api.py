"""The names a tuner file may import, and nothing else from kvprobe."""

from kvprobe.model import (
    DeviceFacts,
    Effect,
    EngineFacts,
    EngineSetting,
    Evidence,
    Facts,
    Finding,
    Interval,
    Proposal,
    RestoreSample,
    ServiceCell,
    Tuner,
)

__all__ = [
    "DeviceFacts",
    "Effect",
    "EngineFacts",
    "EngineSetting",
    "Evidence",
    "Facts",
    "Finding",
    "Interval",
    "Proposal",
    "RestoreSample",
    "ServiceCell",
    "Tuner",
]
