"""The latent cache in pages, as serving engines hold it: any page may belong to any sequence.

Sizes: N pages of P slots, B sequences, T new tokens, C = rank + rope values a slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.ops.cache import to_cache
from kimi_k2.ops.mla import mla_absorbed_attention
from kimi_k2.ops.registry import operation


def store_pages(cache: Tensor, entries: Tensor, slots: Tensor) -> None:
    """Put entries [T, C] into slots int64 [T] of cache [N, P, C], numbered through all pages.

    A negative slot is padding: slot 0 is then written with what it holds, so nothing is read back to the host, and a
    CUDA graph can hold the call. No other token may be for slot 0 beside padding: vLLM gives page 0 to no sequence.
    """
    entries = to_cache(entries, cache.dtype)
    index = slots.clamp(min=0)
    pages, places = index.div(cache.shape[1], rounding_mode="floor"), index % cache.shape[1]
    stored = (slots >= 0).unsqueeze(1)
    if cache.dtype == torch.float8_e4m3fn:  # PyTorch indexes no FP8
        cache, entries = cache.view(torch.uint8), entries.view(torch.uint8)
    cache[pages, places] = torch.where(stored, entries, cache[pages, places])


def gather_pages(cache: Tensor, block_table: Tensor, length: int) -> Tensor:
    """The first `length` slots of each sequence, a copy.

    Args:
        cache: [N, P, C].
        block_table: int32 [B, pages], of each P slots of a sequence; entries past its end may be anything within N.
        length: at least 1.

    Returns:
        [B, length, C].
    """
    count = -(-length // cache.shape[1])
    return cache[block_table[:, :count].long()].flatten(1, 2)[:, :length]


@operation
def paged_mla_decode(
    query: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, softmax_scale: float, rank: int
) -> Tensor:
    """`mla_decode` over pages: attention of one query a sequence over its first `seq_lens` slots.

    Args:
        query: [B, H, C].
        cache, block_table: as `gather_pages` takes them.
        seq_lens: int32 [B]; 0 is padding, whose result is finite and of no meaning.
        softmax_scale: `KimiK2Config.softmax_scale`.
        rank: kv_lora_rank.

    Returns:
        [B, H, rank], sums of latents.
    """
    slots = gather_pages(cache, block_table, max(int(seq_lens.max()), 1)).to(query.dtype)
    latent, rope = query.unsqueeze(1).split([rank, query.shape[-1] - rank], dim=-1)
    positions = seq_lens.unsqueeze(1).long() - 1
    return mla_absorbed_attention(latent, rope, slots, positions, softmax_scale).squeeze(1)
