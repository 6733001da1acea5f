"""Which arithmetic engines tell of themselves: by their options, or not at all."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvprobe.adapter import Process
from kvprobe.arithmetic import ModelArithmetic
from kvprobe.engines import llmd, sglang, vllm
from kvprobe.engines._model_arithmetic import model_arithmetic
from kvprobe.signals.combined import together_with

CONFIGS = Path(__file__).parents[1] / "data" / "model_configs"
LAUNCH = ("python3", "-m", "sglang.launch_server")


def config_of(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
    return found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that is served."""
    folder = tmp_path / "served"
    folder.mkdir()
    shutil.copy(CONFIGS / "qwen3-32b.json", folder / "config.json")
    return folder


def process(*arguments: str) -> Process:
    return Process(17, 1, "python3", arguments, {}, "/srv", None)


def of_vllm(model: Path, *options: str) -> ModelArithmetic | None:
    found = vllm.detect(process("vllm", "serve", str(model), *options))
    assert found is not None and found.facts is not None
    return found.facts.arithmetic


def of_sglang(model: Path, *options: str) -> ModelArithmetic | None:
    assert sglang.ENGINE.detect is not None
    found = sglang.ENGINE.detect(process(*LAUNCH, "--model-path", str(model), *options))
    assert found is not None and found.facts is not None
    return found.facts.arithmetic


QWEN = model_arithmetic(config_of("qwen3-32b"))
assert QWEN is not None
# What an option makes of it.
VLLM: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    ((), {}),
    (("-tp", "4", "--pipeline-parallel-size", "2"), {"devices": 8}),
    (("--max-num-batched-tokens", "2003"), {"tokens_per_pass": 2003}),
    (("--max-num-batched-tokens=16384", "--long-prefill-token-threshold", "1009"),
     {"tokens_per_pass": 1009}),
    (("--max-num-batched-tokens", "8k"), {}),
    (("--long-prefill-token-threshold", "0"), {}),
    (("--kv-cache-dtype", "fp8"), {"kv_bytes_per_token": 131_072}),
    (("--dtype", "float16", "--data-parallel-size", "3"), {}),
)  # fmt: skip
SGLANG: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    ((), {}),
    (("--tp-size", "4", "--pp", "2"), {"devices": 8}),
    (("--chunked-prefill-size", "4093"), {"tokens_per_pass": 4093}),
    (("--chunked-prefill-size", "-1"), {}),
    (("--kv-cache-dtype", "fp8_e5m2"), {"kv_bytes_per_token": 131_072}),
    (("--dp", "3"), {}),
)


@pytest.mark.parametrize(("options", "changes"), VLLM)
def test_vllms_options(model: Path, options: tuple[str, ...], changes: dict[str, Any]) -> None:
    assert QWEN is not None
    assert of_vllm(model, *options) == replace(QWEN, **changes)


@pytest.mark.parametrize(("options", "changes"), SGLANG)
def test_sglangs_options(model: Path, options: tuple[str, ...], changes: dict[str, Any]) -> None:
    assert QWEN is not None
    assert of_sglang(model, *options) == replace(QWEN, **changes)


def test_quantised_while_loading(model: Path) -> None:
    for found in (of_vllm(model, "-q", "fp8"), of_sglang(model, "--quantization", "fp8")):
        assert found is not None and found.item_bits == 8
        assert found.weight_bytes == (QWEN and QWEN.linear_flops_per_token // 2 + QWEN.head_flops)


@pytest.mark.parametrize(
    "options",
    [
        ("--config", "vllm.yaml"),
        ("--enable-lora",),
        ("--hf-overrides", '{"num_hidden_layers": 3}'),
        ("--hf-overrides.num_hidden_layers", "3"),
        ("--speculative-config", '{"method": "ngram"}'),
        ("--speculative-config.method=eagle3",),
        ("-dcp", "2"),
        ("-pp", "3"),
        ("--quantization", "bitsandbytes"),
        ("--dtype", "float32"),
    ],
)
def test_vllm_is_silent_where_it_computes_something_else(
    model: Path, options: tuple[str, ...]
) -> None:
    assert of_vllm(model, *options) is None


@pytest.mark.parametrize(
    "options",
    [
        ("--config", "server.yaml"),
        ("--enable-dp-attention",),
        ("--lora-paths", "a=b"),
        ("--json-model-override-args", "{}"),
        ("--speculative-algorithm", "EAGLE"),
        ("--quantization", "w8a8_int8"),
    ],
)
def test_sglang_is_silent_where_it_computes_something_else(
    model: Path, options: tuple[str, ...]
) -> None:
    assert of_sglang(model, *options) is None


def test_without_a_configuration_nothing_is_known(tmp_path: Path) -> None:
    assert of_vllm(tmp_path / "none") is None
    assert of_sglang(tmp_path / "none") is None


def test_it_is_told_beside_what_is_stored_already(model: Path, tmp_path: Path) -> None:
    root = tmp_path / "kv"
    base = vllm.base_path(str(root), vllm.config_fields(str(model), 48, 1, 1, "bfloat16"))
    Path(base).mkdir(parents=True)
    fields = vllm.config_fields(str(model), 48, 1, 1, "bfloat16")
    Path(base, "config.json").write_text(json.dumps(fields))
    extra = {"secondary_tiers": [{"type": "fs", "root_dir": str(root)}]}
    config = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    found = vllm.detect(
        process("vllm", "serve", str(model), "--kv-transfer-config", json.dumps(config))
    )
    assert found is not None and found.facts is not None
    assert (found.facts.unit_tokens, found.facts.arithmetic) == (48, QWEN)


def test_the_engine_of_the_files_has_it_from_the_one_that_computes(model: Path) -> None:
    extra = {"spec_module_path": "llmd_fs_backend.spec"}
    config = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}
    server = process("vllm", "serve", str(model), "--kv-transfer-config", json.dumps(config))
    files, requests = llmd.detect(server), vllm.detect(server)
    assert files is not None and files.facts is not None
    assert requests is not None and requests.facts is not None
    assert files.facts.arithmetic == QWEN
    silent = replace(files.facts, name="lmcache", arithmetic=None)
    for both in (together_with(requests.facts, silent), together_with(silent, requests.facts)):
        assert (both.name, both.arithmetic) == ("lmcache", QWEN)
