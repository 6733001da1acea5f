"""vLLM's tiered KV offloading on its CPU build, for the live tests and the demo.

vLLM's own ``TieringOffloadingSpec`` refuses CPUs because its last step copies between a GPU and the
host. This subclass, loaded through vLLM's hook for specs out of its tree, replaces that step only:
blocks are copied in memory, at once. Scheduler, hashing, tiers, files, threads, metrics, log and
events are vLLM's. Tied to the internals of vLLM 0.32.

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config":
     {"spec_name": "HostTieringSpec", "spec_module_path": "host_tiering_spec", ...}}
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostCopyWorker(OffloadingWorker):  # type: ignore[misc] # vLLM is elsewhere
    """Copies blocks between the KV cache and the region that the tiers share.

    ``_pairs`` holds for each tensor of the cache its rows (block, bytes) and those of its part of
    the region (chunk, place of the block in the chunk, bytes).
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion
    ) -> None:
        if len(kv_caches.group_data_refs) != 1:
            raise ValueError("HostTieringSpec knows models with one KV cache group only")
        self._blocks_per_chunk = blocks_per_chunk
        self._region = region
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for cache in kv_caches.tensors:
            page = cache.page_size_bytes
            rows = cache.tensor.view(torch.int8).view(-1, page)
            chunks = region.create_next_worker_view(page * blocks_per_chunk)
            self._pairs.append((rows, chunks.unflatten(1, (blocks_per_chunk, page))))
        self._done: list[TransferResult] = []

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: BlockIDsLoadStoreSpec
    ) -> bool:
        """From the KV cache to the region."""
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(
        self, job_id: int, src_spec: BlockIDsLoadStoreSpec, dst_spec: GPULoadStoreSpec
    ) -> bool:
        """From the region to the KV cache."""
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def _copy(
        self, job_id: int, blocks: GPULoadStoreSpec, chunks: BlockIDsLoadStoreSpec, store: bool
    ) -> bool:
        began = time.perf_counter()
        copied_bytes = 0
        # The first block may lie in the middle of its chunk.
        first = blocks.block_indices[0] % self._blocks_per_chunk
        for place, block in enumerate(blocks.block_ids.tolist(), start=first):
            chunk = int(chunks.block_ids[place // self._blocks_per_chunk])
            for rows, stored in self._pairs:
                ours, theirs = rows[block], stored[chunk, place % self._blocks_per_chunk]
                (theirs if store else ours).copy_(ours if store else theirs)
                copied_bytes += ours.numel()
        took = time.perf_counter() - began
        self._done.append(TransferResult(job_id, True, copied_bytes, took))
        return True

    def get_finished(self) -> Sequence[TransferResult]:
        """Every transfer submitted since the last call: none is ever under way."""
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for."""

    def shutdown(self) -> None:
        """Release the region, whose name in /dev/shm goes with it."""
        self._pairs.clear()
        self._region.cleanup()


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc] # vLLM is elsewhere
    """``TieringOffloadingSpec`` whose device is the host."""

    _worker: HostCopyWorker | None

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """The worker of this process, made once."""
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostCopyWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
