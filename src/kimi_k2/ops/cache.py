"""Writing the compressed KV cache: one latent and one rotary key a token a layer."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.ops.registry import ELEMENTWISE, operation


def to_cache(entries: Tensor, dtype: torch.dtype) -> Tensor:
    """Entries as a cache of `dtype` holds them; e4m3 is saturated at 448, as vLLM's FP8 cache of scale 1 is."""
    if dtype == torch.float8_e4m3fn:
        entries = entries.clamp(-448.0, 448.0)
    return entries.to(dtype)


@operation(batch_invariant=ELEMENTWISE)
def store_entries(cache: Tensor, entries: Tensor, positions: Tensor) -> None:
    """Put entries [B, S, C] into the slots `positions` int64 [B, S] of cache [B, T, C]; negative ones into none.

    Positions from T on are the caller's error: PyTorch raises or, on a GPU, may drop them.
    """
    entries = to_cache(entries, cache.dtype)
    if cache.dtype == torch.float8_e4m3fn:  # PyTorch scatters no FP8
        cache, entries = cache.view(torch.uint8), entries.view(torch.uint8)
    if positions.shape[1] == 1:  # a decode step: nothing is read back, so that a CUDA graph can hold it
        index = positions.clamp(min=0).unsqueeze(-1).expand(-1, -1, cache.shape[-1])
        entries = torch.where((positions >= 0).unsqueeze(-1), entries, cache.gather(1, index))
    elif bool((positions < 0).any()):
        rows, columns = torch.where(positions >= 0)
        cache[rows, positions[rows, columns]] = entries[rows, columns]
        return
    else:
        index = positions.unsqueeze(-1).expand(-1, -1, cache.shape[-1])
    cache.scatter_(1, index, entries)
