"""SGLang's HiCacheFile, the class that keeps its pages in files, without the engine around it.

    python sglang_files.py SITE_PACKAGES FOLDER PAGES PAGE_BYTES store|load

Runs with an interpreter that has torch; SITE_PACKAGES has SGLang, whose packages' own start-up
(which needs a GPU's libraries) is left out. Prints one JSON object: pages and bytes got back equal.
"""

import hashlib
import json
import sys
import types

import torch

PACKAGES = (
    "sglang",
    "sglang.srt",
    "sglang.srt.mem_cache",
    "sglang.srt.mem_cache.storage",
    "sglang.srt.mem_cache.storage.file",
    "sglang.srt.utils",
)


def main() -> None:
    """Store pages, or load them and some that were never stored."""
    site, folder, pages, size, way = sys.argv[1:]
    for name in PACKAGES:
        package = types.ModuleType(name)
        package.__path__ = [f"{site}/{name.replace('.', '/')}"]
        sys.modules[name] = package
    # All that the evictor takes from there is how an option is read.
    common = types.ModuleType("sglang.srt.utils.common")
    common.human_readable_int = int  # type: ignore[attr-defined]
    sys.modules[common.__name__] = common
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

    config = HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="org/tiny",
    )
    files = HiCacheFile(config, folder)
    keys = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(int(pages))]
    source = torch.Generator().manual_seed(7)
    values = [
        torch.randint(0, 256, (int(size),), dtype=torch.uint8, generator=source) for _ in keys
    ]
    if way == "store":
        done = sum(files.set(key, value) for key, value in zip(keys, values, strict=True))
        print(json.dumps({"pages": done, "keys": keys}))
        return
    hits = [key for key in [*keys, "f" * 64] if files.exists(key)]
    got = [files.get(key, torch.empty_like(values[0])) for key in hits]
    equal = sum(torch.equal(a, b) for a, b in zip(got, values, strict=True) if a is not None)
    print(json.dumps({"hits": len(hits), "equal": equal, "bytes": sum(g.nbytes for g in got)}))


if __name__ == "__main__":
    main()
