"""The arithmetic of an engine's model in a capture's manifest: kept, and without names."""

from dataclasses import replace

import pytest

from kvprobe.arithmetic import ModelArithmetic
from kvprobe.capture.manifest import Clock, Manifest
from kvprobe.capture.redact import Redactor
from kvprobe.capture.typed_json import from_json, parse_json, to_json
from kvprobe.model import EngineFacts

KNOWN = ModelArithmetic(101, 103, 107, 109, 113, 2, 8, 127, "meta-llama/Llama-3.1-8B config.json")


def manifest(arithmetic: ModelArithmetic | None) -> Manifest:
    engine = EngineFacts("vllm", arithmetic=arithmetic)
    return Manifest("0", "id", 0, 10, Clock(0), engine=engine)


@pytest.mark.parametrize("arithmetic", [None, KNOWN, replace(KNOWN, tokens_per_pass=None)])
def test_it_is_read_as_it_was_written(arithmetic: ModelArithmetic | None) -> None:
    written = manifest(arithmetic)
    assert from_json(Manifest, parse_json(to_json(written))) == written


def test_redaction_hides_where_a_model_is_kept_and_nothing_else() -> None:
    engine = Redactor().manifest(manifest(KNOWN)).engine
    assert engine is not None and engine.arithmetic == KNOWN
    told = replace(KNOWN, source="/home/secretuser/model/config.json")
    engine = Redactor().manifest(manifest(told)).engine
    assert engine is not None and engine.arithmetic is not None
    assert "secretuser" not in engine.arithmetic.source
    assert replace(engine.arithmetic, source=told.source) == told
