"""What vLLM's worker says of its memory: `--worker-extension-cls vllm_memory.Memory`, asked by /collective_rpc."""

from __future__ import annotations

import gc

import torch

NAMES = {"allocated": "allocated_bytes.all.current", "reserved": "reserved_bytes.all.current",
         "peak": "allocated_bytes.all.peak"}  # fmt: skip


class Memory:
    """Methods that a worker gets; the names are ours, since vLLM refuses those that its worker has."""

    def kimi_k2_memory(self, release: str = "") -> dict[str, int]:
        """Bytes of PyTorch's allocator on a GPU; with `release` it first gives back what it holds unused."""
        if not torch.cuda.is_available():
            return {}
        if release:
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        stats = torch.cuda.memory_stats()
        return {name: int(stats[key]) for name, key in NAMES.items()}
