"""Which paths are LMCache's, and the hash of the chunk in each.

=====================  ============================================================================
local_disk             ``MODEL@WORLD@WORKER@HASH@DTYPE[@LAYER][@TAG%VALUE].pt``, 0.3.13 and later;
                       before, a field such as ``vllm@`` in front, and DTYPE may be missing
``fs://`` connector    the same with ``.data``; ``.tmp`` while it is written
GDS                    ``HH/HH/`` and the same with ``%xx`` and ``.kvcache.safetensors`` (WekaFS:
                       ``.weka1``); beside it ``.metadata``, whose existence is the lookup
server: fs, fs_native  ``MODEL@0xRANK@GROUP@HASH[@SALT].data``; ``.tmp`` while it is written
server: nixl dynamic   ``MODEL_RANK_GROUP_HASH[@SALT].bin``; ``.bin.tmp.UUID`` while it is written
nixl pool              ``obj_NUMBER_XXXX.bin``: pages of any chunk
=====================  ============================================================================

Each rank has its own file of a chunk, under the same hash. With ``relative_tmp_dir`` a file that is
being written has its final name in another folder. ``raw_block`` is a device and has no paths.
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from kvprobe.adapter import KVPath

NAME_MAX = 255
"""Bytes that Linux allows in a file name."""

_TYPE = r"(?:half|double|bfloat16|float(?:16|32|64)?|float8_\w+|fp8(?:_\w+)?|u?int(?:8|16|32|64))"
_HASH = r"-?[0-9a-f]{8,64}"  # the builtin hash of Python is signed
_TAGS = r"(?:@[^/@%]+%[^/@]*)*"
_IN_PROCESS = re.compile(
    rf"(?:[a-z]\w*@[^/@]+@\d+@\d+@(?P<old>{_HASH})(?:@{_TYPE})?|"
    rf"[^/@]+@\d+@\d+@(?P<new>{_HASH})@{_TYPE})"
    rf"{_TAGS}(?:@\d+)?{_TAGS}"
)
_SERVER = re.compile(r"[^/@]+@0x[0-9a-f]{8}@[0-9a-f]+@((?:[0-9a-f]{2}){8,64})(?:@[^/@]+)?")
_DYNAMIC = re.compile(
    r"[^/@]+_[0-9a-f]{8}_[0-9a-f]+_((?:[0-9a-f]{2}){16,64})(?:@[^/@]+)?"
    r"\.bin(\.tmp\.[0-9a-f]{32})?"
)
_POOL = re.compile(r"(obj_\d+_[0-9a-f]{4})\.bin")
_GDS = re.compile(r"([^/]+)\.(?:kvcache\.safetensors|weka1)(?:\.metadata)?(\.tmp[0-9a-f]{8})?")


def recognise(path: str) -> KVPath | None:
    """The hash of a chunk's file, as the lookup-hash log has it but for its ``0x``; else None."""
    folder, _, name = path.rpartition("/")
    if len(name) > NAME_MAX:
        return None
    stem, _, kind = name.rpartition(".")
    if kind in ("data", "tmp", "pt"):
        server = "@0x" in stem and kind != "pt"
        key = _server(stem) if server else in_process(stem)
        return None if key is None else KVPath(key, temporary=kind == "tmp")
    if ".bin" in name and "_" in name:
        pool = _POOL.fullmatch(name)
        if pool:
            return KVPath(pool[1], shared=True)
        dynamic = _DYNAMIC.fullmatch(name)
        return KVPath(dynamic[1], dynamic[2] is not None) if dynamic else None
    return _gds(folder, name) if "%40" in name else None


def in_process(key: str) -> str | None:
    """The hash in a key of in-process LMCache as it stands in a file name, else None."""
    match = _IN_PROCESS.fullmatch(key)
    return (match["old"] or match["new"]) if match else None


def _server(stem: str) -> str | None:
    match = _SERVER.fullmatch(stem)
    return match[1] if match else None


def _gds(folder: str, name: str) -> KVPath | None:
    """The folders are the first digits of the hash, in newer versions of it as a decimal number."""
    match = _GDS.fullmatch(name)
    key = in_process(unquote(match[1]).replace("/", "-")) if match else None
    if match is None or key is None:
        return None
    first, second = folder.split("/")[-2:] if "/" in folder else ("", folder)
    if (first, second) not in [(t[:2], t[2:4]) for t in (key, str(int(key, 16)))]:
        return None
    return KVPath(key, temporary=match[2] is not None)
