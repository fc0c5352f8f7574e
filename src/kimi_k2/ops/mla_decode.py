"""Absorbed MLA of one new token a sequence: the functions of `ops.mla`, joined as kernels join them.

Sizes: B sequences, T cache slots, H heads; rank is kv_lora_rank, rope qk_rope_head_dim, nope qk_nope_head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.ops.cache import store_entries
from kimi_k2.ops.linear import project
from kimi_k2.ops.mla import absorb, cache_entries, mla_absorbed_attention, rotated_queries, value_heads
from kimi_k2.ops.norm import rms_norm
from kimi_k2.ops.registry import COMPOSED, ELEMENTWISE, operation
from kimi_k2.ops.weights import Weight


@operation(batch_invariant=ELEMENTWISE)
def sequence_lengths(positions: Tensor) -> Tensor:
    """int32 [B], slots in use once the token at `positions` int64 [B] is stored."""
    return (positions + 1).to(torch.int32)


@operation
def absorb_and_store(
    q: Tensor,
    kv_a: Tensor,
    norm_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    w_uk: Tensor,
    cache: Tensor,
    eps: float,
) -> Tensor:
    """Store the new token's entry and make its query.

    Args:
        q: [B, H * (nope + rope)], not rotated.
        kv_a: [B, rank + rope], the latent before its norm, then the key before RoPE.
        norm_weight: [rank].
        cos: [B, rope / 2] at `positions`.
        sin: [B, rope / 2] at `positions`.
        positions: int64 [B], slots to write; a negative one writes nothing.
        w_uk: [H, nope, rank].
        cache: [B, T, rank + rope], written.
        eps: of the latent's norm.

    Returns:
        [B, H, rank + rope], W_UK^T q_nope, then the rotated part.
    """
    heads, nope, rank = w_uk.shape
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    latent, k_rope = kv_a.unsqueeze(1).split([rank, kv_a.shape[1] - rank], dim=-1)
    entries = cache_entries(rms_norm(latent, norm_weight, eps), k_rope, cos, sin)
    store_entries(cache, entries, positions.unsqueeze(1))
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
    positions: Tensor,
    w_uk: Tensor,
    cache: Tensor,
    q_eps: float,
    kv_eps: float,
) -> Tensor:
    """`absorb_and_store` of q = q_b(rms_norm(q_a)).

    Args:
        qkv_a: [B, q_lora_rank + rank + rope], q_a and kv_a side by side.
        q_norm: [q_lora_rank].
        q_b: [H * (nope + rope), q_lora_rank].
        kv_norm: `norm_weight` of `absorb_and_store`, [rank].
        cos: as `absorb_and_store` takes it.
        sin: as `absorb_and_store` takes it.
        positions: as `absorb_and_store` takes them.
        w_uk: as `absorb_and_store` takes it.
        cache: as `absorb_and_store` takes it, written.
        q_eps: epsilon of the queries' norm.
        kv_eps: epsilon of the latent's norm.

    Returns:
        [B, H, rank + rope].
    """
    q_a, kv_a = qkv_a.split([q_norm.shape[0], qkv_a.shape[1] - q_norm.shape[0]], dim=-1)
    q = project(q_a, q_b, q_norm, q_eps)
    return absorb_and_store(q, kv_a, kv_norm, cos, sin, positions, w_uk, cache, kv_eps)


@operation(batch_invariant="nothing is planned")
def attention_plan(seq_lens: Tensor, cache: Tensor, heads: int) -> Tensor | None:
    """How kernels share the attention of a step's layers out by the sequences' lengths; None where none needs that.

    Args:
        seq_lens: int32 [B], as `mla_decode` takes them.
        cache: [B, T, rank + rope], of any layer.
        heads: of the queries.

    Returns:
        For `mla_decode` and `attend_values` over these lengths.
    """
    return None


@operation
def mla_decode(
    query: Tensor, cache: Tensor, seq_lens: Tensor, softmax_scale: float, rank: int, plan: Tensor | None = None
) -> Tensor:
    """Attention of one query a sequence over its first `seq_lens` slots.

    Args:
        query: [B, H, rank + rope], from `absorb_and_store`.
        cache: [B, T, rank + rope].
        seq_lens: int32 [B], at least 1.
        softmax_scale: `KimiK2Config.softmax_scale`.
        rank: kv_lora_rank.
        plan: of `attention_plan`, for kernels.

    Returns:
        [B, H, rank], sums of latents.
    """
    latent, rope = query.unsqueeze(1).split([rank, query.shape[-1] - rank], dim=-1)
    positions = seq_lens.unsqueeze(1) - 1
    return mla_absorbed_attention(latent, rope, cache.to(query.dtype), positions, softmax_scale).squeeze(1)


@operation
def value_rows(latent: Tensor, w_uv: Tensor) -> Tensor:
    """Sums of latents [B, H, rank] times W_UV [H, v_head_dim, rank]: [B, H * v_head_dim]."""
    return value_heads(latent.unsqueeze(1), w_uv).flatten(1)


@operation(batch_invariant=COMPOSED)
def attend_values(
    query: Tensor, cache: Tensor, seq_lens: Tensor, w_uv: Tensor, softmax_scale: float, plan: Tensor | None = None
) -> Tensor:
    """`value_rows` of `mla_decode`: [B, H * v_head_dim]."""
    return value_rows(mla_decode(query, cache, seq_lens, softmax_scale, w_uv.shape[-1], plan), w_uv)
