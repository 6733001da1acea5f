"""The options of ``kvprobe workload`` and what they mean together."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

from kvprobe.errors import KvprobeError

if TYPE_CHECKING:
    from kvprobe.workload.run import Config

_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def configure(parser: ArgumentParser) -> None:
    """Add the two actions and their options."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    run_parser = actions.add_parser(
        "run", help="store, look up and restore chunks, prefill the rest", allow_abbrev=False
    )
    _add_storage(run_parser)
    _add_model(run_parser)
    _add_requests(run_parser)
    _add_engine(run_parser)
    _add_output(run_parser)
    analyse = actions.add_parser(
        "analyse", help="how much of a trace could be restored, by unit", allow_abbrev=False
    )
    analyse.add_argument("trace", metavar="TRACE", help="Mooncake JSON lines")
    analyse.add_argument(
        "--unit-tokens", default="16,64,256,512,1024", metavar="N,N", help="units (%(default)s)"
    )
    analyse.add_argument("--requests", type=count, metavar="N", help="only the first N")
    analyse.add_argument("--json", action="store_true", help="one JSON document on stdout")


def _add_storage(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("storage")
    group.add_argument("--root", required=True, metavar="DIR", help="folder for the chunk files")
    group.add_argument(
        "--layout", choices=["vllm"], default="vllm", help="path scheme (%(default)s)"
    )
    group.add_argument(
        "--unit-tokens", type=count, default=16, metavar="N", help="tokens a file (%(default)s)"
    )
    group.add_argument(
        "--reads-in-flight",
        type=count,
        default=1,
        metavar="N",
        help="reads a request keeps going at once (%(default)s)",
    )
    group.add_argument(
        "--io", choices=["sync", "io_uring"], default="sync", help="how it reads (%(default)s)"
    )
    mode = group.add_mutually_exclusive_group()
    mode.add_argument(
        "--direct", dest="direct", action="store_true", default=True, help="direct I/O (default)"
    )
    mode.add_argument("--buffered", dest="direct", action="store_false", help="page cache")
    group.add_argument(
        "--capacity-bytes",
        type=_bytes,
        metavar="SIZE",
        help="evict the least recently used chunks above this; K, M, G, T",
    )
    group.add_argument(
        "--warm",
        choices=["none", "reused", "all"],
        default="none",
        help="store chunks first: none, those that several requests share, all (%(default)s)",
    )
    group.add_argument("--warm-only", action="store_true", help="store, then stop")
    group.add_argument(
        "--drop-caches",
        action="store_true",
        help="before the run, write back and drop the page cache of the whole machine (root)",
    )
    group.add_argument(
        "--no-store", dest="store", action="store_false", help="do not store what was computed"
    )
    group.add_argument(
        "--read-threads", type=count, default=16, metavar="N", help="load threads (%(default)s)"
    )
    group.add_argument(
        "--write-threads", type=count, default=4, metavar="N", help="store threads (%(default)s)"
    )
    group.add_argument("--clean", action="store_true", help="remove the chunk files at the end")


def _add_model(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("model (a preset, or custom with dimensions)")
    group.add_argument(
        "--model",
        default="llama-3.1-8b",
        metavar="NAME",
        help="tiny, llama-3.1-8b, llama-3-70b, qwen3-32b, deepseek-v3, moe-480b-tp8 (62 layers, "
        "8 KV heads x 128, TP 8), custom (%(default)s)",
    )
    for name in ("layers", "kv-heads", "head-dim", "tp", "kv-lora-rank", "rope-dim"):
        group.add_argument(f"--{name}", type=count, metavar="N")
    group.add_argument("--dtype", metavar="NAME", help="bf16, fp16, fp8, int8, fp32")


def _add_requests(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("requests (a trace, or a synthetic one)")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--trace", metavar="FILE", help="Mooncake JSON lines")
    source.add_argument("--synthetic", action="store_true", help="made-up prompts (default)")
    group.add_argument("--requests", type=count, metavar="N", help="how many (100; trace: all)")
    group.add_argument("--max-prompt-tokens", type=count, metavar="N", help="cut longer prompts")
    group.add_argument(
        "--prompt-tokens",
        type=count,
        default=4096,
        metavar="N",
        help="synthetic: median length (%(default)s)",
    )
    group.add_argument(
        "--prompt-sigma",
        type=float,
        default=0.5,
        metavar="X",
        help="synthetic: log-normal spread (%(default)s)",
    )
    group.add_argument(
        "--prefixes",
        type=count,
        default=16,
        metavar="N",
        help="synthetic: number of shared prefixes (%(default)s)",
    )
    group.add_argument(
        "--zipf",
        type=float,
        default=1.0,
        metavar="X",
        help="synthetic: how unevenly they are used (%(default)s)",
    )
    group.add_argument(
        "--shared-share",
        type=float,
        default=0.8,
        metavar="X",
        help="synthetic: shared part of a prompt (%(default)s)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="(%(default)s)")
    group.add_argument(
        "--concurrency", type=count, metavar="N", help="closed loop: requests at once (1)"
    )
    group.add_argument(
        "--rate", type=_positive, metavar="X", help="open loop: requests a second, Poisson"
    )
    group.add_argument(
        "--time-scale", type=_positive, metavar="X", help="open loop: the trace's times times X"
    )


def _add_engine(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--slots",
        type=count,
        metavar="N",
        help="requests scheduled at once (the concurrency; open loop: 8)",
    )
    group.add_argument(
        "--policy",
        nargs="+",
        default=["restore"],
        metavar="restore|recompute|threshold TOKENS",
        help="what to do with stored chunks (restore)",
    )
    group.add_argument(
        "--prefetch", action="store_true", help="restore on arrival, not when scheduled"
    )
    group.add_argument(
        "--lookup",
        choices=["first-miss", "every"],
        default="first-miss",
        help="chunks that are looked up (%(default)s)",
    )
    group.add_argument(
        "--device-cache-tokens",
        type=_whole,
        default=0,
        metavar="N",
        help="simulated prefix cache of the accelerator (%(default)s)",
    )
    group.add_argument(
        "--prefill",
        choices=["model", "blas"],
        default="model",
        help="a wait that follows the cost, or matrix products of that cost (%(default)s)",
    )
    group.add_argument(
        "--prefill-cost",
        default=None,
        metavar="A_MS,B_US,C_NS",
        help="a + b*new + c*new*(context + new/2) (4,80,0.4)",
    )
    group.add_argument(
        "--step-ms", type=float, default=1.0, metavar="X", help="scheduler step (%(default)s)"
    )


def _add_output(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--events", metavar="FILE", help="request events, docs/engine-events.md")
    group.add_argument("--emit-keys", action="store_true", help="chunk keys in the events")
    group.add_argument("--truth", metavar="FILE", help="every operation and whose it was")
    group.add_argument(
        "--accelerator-log",
        metavar="FILE",
        help="what the modelled accelerator does, as a script for a stand-in of the NVIDIA driver "
        "(for tests of kvprobe's own GPU side; restored bytes are copied at 8 GiB/s then)",
    )
    group.add_argument("--json", action="store_true", help="one JSON document on stdout")


def config_of(options: Namespace) -> Config:
    """The configuration that the options of ``run`` describe.

    Raises:
        KvprobeError: options that contradict each other or lack a meaning.
    """
    from kvprobe.workload.prefill import DEFAULT_COST, PrefillCost
    from kvprobe.workload.prompts import Synthetic
    from kvprobe.workload.run import Config
    from kvprobe.workload.shapes import preset

    if options.concurrency and (options.rate or options.time_scale):
        raise KvprobeError(
            "--concurrency is for a closed loop, --rate and --time-scale for an open one",
            "give one of them; --slots bounds what an open loop schedules at once",
        )
    if options.rate and options.time_scale:
        raise KvprobeError("--rate and --time-scale contradict each other", "give one of them")
    if options.time_scale and not options.trace:
        raise KvprobeError("--time-scale needs --trace", "use --rate for synthetic requests")
    shape = preset(
        options.model,
        layers=options.layers,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        tp=options.tp,
        dtype=options.dtype,
        kv_lora_rank=options.kv_lora_rank,
        rope_dim=options.rope_dim,
    )
    synthetic = (
        None
        if options.trace
        else Synthetic(
            options.requests or 100,
            options.prompt_tokens,
            options.prompt_sigma,
            options.prefixes,
            options.zipf,
            options.shared_share,
            options.seed,
        )
    )
    return Config(
        shape=shape,
        synthetic=synthetic,
        concurrency=options.concurrency or 1,
        cost=PrefillCost.parse(options.prefill_cost or DEFAULT_COST),
        restore_from_tokens=_restore_from(options.policy),
        lookup_every=options.lookup == "every",
        step_ns=round(options.step_ms * 1e6),
        **{name: getattr(options, name) for name in _SAME},
    )


_SAME = (
    "root",
    "unit_tokens",
    "trace",
    "requests",
    "max_prompt_tokens",
    "reads_in_flight",
    "direct",
    "io",
    "slots",
    "rate",
    "time_scale",
    "prefill",
    "prefetch",
    "device_cache_tokens",
    "store",
    "warm",
    "warm_only",
    "drop_caches",
    "capacity_bytes",
    "read_threads",
    "write_threads",
    "emit_keys",
    "seed",
    "events",
    "truth",
    "accelerator_log",
    "clean",
)
"""Options that are fields of ``Config`` under the same name."""


def _restore_from(words: list[str]) -> int:
    """The shortest stored prefix, in tokens, that is restored."""
    match words:
        case ["restore"]:
            return 0
        case ["recompute"]:
            return sys.maxsize
        case ["threshold", tokens] if tokens.isdecimal():
            return int(tokens)
    raise KvprobeError(f"no policy {' '.join(words)!r}", "restore, recompute or threshold TOKENS")


def count(text: str) -> int:
    """A positive whole number.

    Raises:
        KvprobeError: it is not.
    """
    value = _whole(text)
    if value < 1:
        raise KvprobeError(f"want a positive number, got {text!r}", "see --help")
    return value


def _whole(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        raise KvprobeError(f"want a whole number, got {text!r}", "see --help") from None
    if not 0 <= value < 1 << 53:
        raise KvprobeError(f"number out of range: {text!r}", "see --help")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e12:
        raise KvprobeError(f"want a positive number, got {text!r}", "see --help")
    return value


def _bytes(text: str) -> int:
    factor = _UNITS.get(text[-1:].upper(), 0)
    return count(text[:-1]) * factor if factor else count(text)
