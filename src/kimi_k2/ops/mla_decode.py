"""Absorbed MLA of one new token a sequence: the functions of `ops.mla`, joined as kernels join them.

Sizes: B sequences, N pages of P slots, H heads; rank is kv_lora_rank, rope qk_rope_head_dim, nope qk_nope_head_dim,
C = rank + rope. `block_table` names the pages of each sequence, any of the cache's; without one a sequence has one
page, sequence b page b of N = B.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.ops.cache import gather_pages, store_slots
from kimi_k2.ops.linear import Weight, in_blocks, project, rms_norm
from kimi_k2.ops.mla import absorb, cache_entries, mla_absorbed_attention, rotated_queries, value_heads
from kimi_k2.ops.registry import COMPOSED, operation

# Slots of a sequence whose entries the plain function over pages copies at a time.
SLOTS_AT_ONCE = 512


@operation
def absorb_and_store(
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
    """Store the new token's entry and make its query.

    Args:
        q: [B, H * (nope + rope)], not rotated.
        kv_a: [B, C], the latent before its norm, then the key before RoPE.
        norm_weight: [rank].
        cos: [B, rope / 2] at the token's position.
        sin: [B, rope / 2] at the token's position.
        slots: int64 [B], slots to write, numbered through all N * P; a negative one writes nothing.
        w_uk: [H, nope, rank].
        cache: [N, P, C], written.
        eps: of the latent's norm.

    Returns:
        [B, H, C], W_UK^T q_nope, then the rotated part.
    """
    heads, nope, rank = w_uk.shape
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    latent, k_rope = kv_a.unsqueeze(1).split([rank, kv_a.shape[1] - rank], dim=-1)
    store_slots(cache, cache_entries(rms_norm(latent, norm_weight, eps), k_rope, cos, sin).squeeze(1), slots)
    q_nope, q_rope = rotated_queries(q.view(len(q), 1, heads, -1), nope, cos, sin)
    return torch.cat((absorb(q_nope, w_uk), q_rope), dim=-1).squeeze(1)


@operation(batch_invariant=COMPOSED)
def query_and_entry(
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
    """`absorb_and_store` of q = q_b(rms_norm(q_a)).

    Args:
        qkv_a: [B, q_lora_rank + C], q_a and kv_a side by side.
        q_norm: [q_lora_rank].
        q_b: [H * (nope + rope), q_lora_rank].
        kv_norm: `norm_weight` of `absorb_and_store`, [rank].
        cos, sin, slots, w_uk: as `absorb_and_store` takes them.
        cache: as `absorb_and_store` takes it, written.
        q_eps: epsilon of the queries' norm.
        kv_eps: epsilon of the latent's norm.

    Returns:
        [B, H, C].
    """
    q_a, kv_a = qkv_a.split([q_norm.shape[0], qkv_a.shape[1] - q_norm.shape[0]], dim=-1)
    q = project(q_a, q_b, q_norm, q_eps)
    return absorb_and_store(q, kv_a, kv_norm, cos, sin, slots, w_uk, cache, kv_eps)


@operation(batch_invariant="nothing is planned")
def attention_plan(seq_lens: Tensor, cache: Tensor, heads: int, block_table: Tensor | None = None) -> Tensor | None:
    """How kernels share the attention of a step's layers out by the sequences' lengths; None where none needs that.

    Args:
        seq_lens: int32 [B], as `mla_decode` takes them.
        cache: [N, P, C], of any layer.
        heads: of the queries.
        block_table: as `mla_decode` takes it.

    Returns:
        For `mla_decode` and `attend_values` over these lengths.
    """
    return None


@operation
def mla_decode(
    query: Tensor,
    cache: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    rank: int,
    plan: Tensor | None = None,
    block_table: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attention of one query a sequence over its first `seq_lens` slots.

    Args:
        query: [B, H, C], from `absorb_and_store`.
        cache: [N, P, C].
        seq_lens: int32 [B]; 0 is padding, whose result is finite and of no meaning.
        softmax_scale: `KimiK2Config.softmax_scale`.
        rank: kv_lora_rank.
        plan: of `attention_plan`, for kernels.
        block_table: int32 [B, pages]; entries past a sequence's end may be any page.
        lse: float32 or wider [B, H], takes the natural logarithms of the sums of exponentials; -inf of padding.

    Returns:
        [B, H, rank], sums of latents.
    """
    # On a CPU, where reading a length waits for nothing, slots that no sequence uses are left out.
    longest = max(int(seq_lens.max()), 1) if query.device.type == "cpu" and len(query) else None
    if lse is not None and block_table is None:
        block_table = torch.arange(len(cache), dtype=torch.int32, device=cache.device).unsqueeze(1)
    if block_table is not None:
        block_table = block_table if longest is None else block_table[:, : -(-longest // cache.shape[1])]
        if lse is not None or not in_blocks(query):
            return _attend_pages(query, cache, block_table, seq_lens, softmax_scale, rank, lse)
        cache = gather_pages(cache, block_table, block_table.shape[1] * cache.shape[1])
    cache = cache if longest is None else cache[:, :longest]
    latent, rope = query.unsqueeze(1).split([rank, query.shape[-1] - rank], dim=-1)
    positions = seq_lens.unsqueeze(1).long() - 1
    return mla_absorbed_attention(latent, rope, cache.to(query.dtype), positions, softmax_scale).squeeze(1)


def _attend_pages(
    query: Tensor, cache: Tensor, block_table: Tensor, seq_lens: Tensor, softmax_scale: float, rank: int,
    lse: Tensor | None,
) -> Tensor:  # fmt: skip
    """`mla_decode` over pages by an online softmax: some pages are copied at a time, and nothing is read back."""
    wide, page = torch.promote_types(query.dtype, torch.float32), cache.shape[1]
    last = (seq_lens.long() - 1).clamp(min=0)[:, None, None]  # padding sees its first slot
    top = query.new_full((*query.shape[:2], 1), float("-inf"), dtype=wide)
    total, summed = torch.zeros_like(top), query.new_zeros(*query.shape[:2], rank, dtype=wide)
    for number, pages in enumerate(block_table.split(max(1, SLOTS_AT_ONCE // page), dim=1)):
        entries = cache[pages.long()].flatten(1, 2).to(query.dtype)
        first = number * max(1, SLOTS_AT_ONCE // page) * page
        slots = torch.arange(first, first + entries.shape[1], device=query.device)
        scores = torch.matmul(query, entries.mT).to(wide) * softmax_scale
        scores = scores.masked_fill_(slots > last, float("-inf"))
        best = torch.maximum(top, scores.amax(-1, keepdim=True))
        shrink, weights = (top - best).exp(), (scores - best).exp()
        total = total * shrink + weights.sum(-1, keepdim=True)
        summed = summed * shrink + torch.matmul(weights.to(query.dtype), entries[..., :rank])
        top = best
    if lse is not None:
        lse.copy_((top + total.log()).squeeze(-1).masked_fill(seq_lens.unsqueeze(1) <= 0, float("-inf")))
    return (summed / total).to(query.dtype)


@operation
def value_rows(latent: Tensor, w_uv: Tensor) -> Tensor:
    """Sums of latents [B, H, rank] times W_UV [H, v_head_dim, rank]: [B, H * v_head_dim]."""
    return value_heads(latent.unsqueeze(1), w_uv).flatten(1)


@operation(batch_invariant=COMPOSED)
def attend_values(
    query: Tensor,
    cache: Tensor,
    seq_lens: Tensor,
    w_uv: Tensor,
    softmax_scale: float,
    plan: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """`value_rows` of `mla_decode`: [B, H * v_head_dim]."""
    summed = mla_decode(query, cache, seq_lens, softmax_scale, w_uv.shape[-1], plan, block_table)
    return value_rows(summed, w_uv)
