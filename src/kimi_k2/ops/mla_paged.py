"""The latent cache in pages, as serving engines hold it: any page may belong to any sequence.

Sizes: N pages of P slots, B sequences, T new tokens, C = rank + rope values a slot.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.ops.cache import to_cache
from kimi_k2.ops.linear import project
from kimi_k2.ops.mla import absorb, cache_entries, mla_absorbed_attention, rotated_queries
from kimi_k2.ops.mla_decode import value_rows
from kimi_k2.ops.norm import rms_norm
from kimi_k2.ops.registry import operation
from kimi_k2.ops.weights import Weight


def store_pages(cache: Tensor, entries: Tensor, slots: Tensor) -> None:
    """Put entries [T, C] into slots int64 [T] of cache [N, P, C], numbered through all pages.

    A negative slot is padding: slot 0 is then written with what it holds, so nothing is read back to the host, and a
    CUDA graph can hold the call. No other token may be for slot 0 beside padding: vLLM gives page 0 to no sequence.
    """
    write_places(cache, to_cache(entries, cache.dtype), page_places(slots, cache.shape[1]))


def page_places(slots: Tensor, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """Page and place in it of each slot [T], and [T, 1] whether there is one; the same for the caches of all layers."""
    index = slots.clamp(min=0)
    return index.div(page, rounding_mode="floor"), index % page, (slots >= 0).unsqueeze(1)


def write_places(cache: Tensor, entries: Tensor, places: tuple[Tensor, Tensor, Tensor]) -> None:
    """`store_pages` of entries in the cache's dtype at `page_places`."""
    pages, within, stored = places
    if cache.dtype == torch.float8_e4m3fn:  # PyTorch indexes no FP8
        cache, entries = cache.view(torch.uint8), entries.view(torch.uint8)
    cache[pages, within] = torch.where(stored, entries, cache[pages, within])


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
def paged_absorb_and_store(
    q: Tensor,
    kv_a: Tensor,
    norm_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    w_uk: Tensor,
    cache: Tensor,
    eps: float,
) -> Tensor:
    """`absorb_and_store` into pages.

    Args:
        q, kv_a, norm_weight, cos, sin, w_uk, eps: as `absorb_and_store` takes them.
        slots, cache: as `store_pages` takes them; the cache is written.

    Returns:
        [B, H, C], W_UK^T q_nope, then the rotated part.
    """
    heads, nope, rank = w_uk.shape
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    latent, k_rope = kv_a.unsqueeze(1).split([rank, kv_a.shape[1] - rank], dim=-1)
    store_pages(cache, cache_entries(rms_norm(latent, norm_weight, eps), k_rope, cos, sin).squeeze(1), slots)
    q_nope, q_rope = rotated_queries(q.view(len(q), 1, heads, -1), nope, cos, sin)
    return torch.cat((absorb(q_nope, w_uk), q_rope), dim=-1).squeeze(1)


@operation
def paged_query_and_entry(
    qkv_a: Tensor,
    q_norm: Tensor,
    q_b: Weight,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    w_uk: Tensor,
    cache: Tensor,
    q_eps: float,
    kv_eps: float,
) -> Tensor:
    """`query_and_entry` into pages.

    Args:
        qkv_a, q_norm, q_b, kv_norm, cos, sin, w_uk, q_eps, kv_eps: as `query_and_entry` takes them.
        slots, cache: as `store_pages` takes them; the cache is written.

    Returns:
        [B, H, C].
    """
    q_a, kv_a = qkv_a.split([q_norm.shape[0], qkv_a.shape[1] - q_norm.shape[0]], dim=-1)
    q = project(q_a, q_b, q_norm, q_eps)
    return paged_absorb_and_store(q, kv_a, kv_norm, cos, sin, slots, w_uk, cache, kv_eps)


@operation
def paged_attention_plan(seq_lens: Tensor, cache: Tensor, block_table: Tensor, heads: int) -> Tensor | None:
    """`attention_plan` over pages.

    Args:
        seq_lens, cache, block_table: as `paged_mla_decode` takes them.
        heads: of the queries.
    """
    return None


@operation
def paged_mla_decode(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    rank: int,
    plan: Tensor | None = None,
) -> Tensor:
    """`mla_decode` over pages: attention of one query a sequence over its first `seq_lens` slots.

    Args:
        query: [B, H, C].
        cache, block_table: as `gather_pages` takes them.
        seq_lens: int32 [B]; 0 is padding, whose result is finite and of no meaning.
        softmax_scale: `KimiK2Config.softmax_scale`.
        rank: kv_lora_rank.
        plan: of `paged_attention_plan`, for kernels.

    Returns:
        [B, H, rank], sums of latents.
    """
    slots = gather_pages(cache, block_table, max(int(seq_lens.max()), 1)).to(query.dtype)
    latent, rope = query.unsqueeze(1).split([rank, query.shape[-1] - rank], dim=-1)
    positions = seq_lens.unsqueeze(1).long() - 1
    return mla_absorbed_attention(latent, rope, slots, positions, softmax_scale).squeeze(1)


@operation
def paged_attend_values(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    w_uv: Tensor,
    softmax_scale: float,
    plan: Tensor | None = None,
) -> Tensor:
    """`value_rows` of `paged_mla_decode`: [B, H * v_head_dim]."""
    summed = paged_mla_decode(query, cache, block_table, seq_lens, softmax_scale, w_uv.shape[-1], plan)
    return value_rows(summed, w_uv)
