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
from kvprobe.prediction import (
    in_words,
    lost_prefix_ns,
    predict_restore,
    predict_ttft,
    restore_effect,
    setting,
    settings_after,
    sweep_command,
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
    "in_words",
    "lost_prefix_ns",
    "predict_restore",
    "predict_ttft",
    "restore_effect",
    "setting",
    "settings_after",
    "sweep_command",
]
