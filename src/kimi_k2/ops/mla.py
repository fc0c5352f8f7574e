"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), naive and with absorbed weights.

The cache holds, for each token, the normed latent c (kv_lora_rank) and one rotary key shared by all heads. The naive
form expands every cached latent to keys and values. The absorbed form moves kv_b_proj to the other side:
q_nope . (W_UK c) = (W_UK^T q_nope) . c, and the value projection W_UV is applied after the weighted sum of latents.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kimi_k2.ops.embedding import apply_rotary_interleaved, rotate_in_place
from kimi_k2.ops.linear import attend_blocks, in_blocks, linear_heads, linear_rows
from kimi_k2.ops.registry import COMPOSED, operation


def rotated_queries(q: Tensor, nope: int, cos: Tensor, sin: Tensor, *, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """The part of the queries without position, and the rotated rest.

    Args:
        q: [B, S, H, nope + rope], not rotated; with `in_place` nobody reads it afterwards.
        nope: qk_nope_head_dim.
        cos: cosines of the positions' angles, [B, S, rope / 2].
        sin: their sines, of the same shape.

    Returns:
        [B, S, H, nope] and [B, S, H, rope].
    """
    q_nope, q_rope = q.split([nope, q.shape[-1] - nope], dim=-1)
    rotate = rotate_in_place if in_place else apply_rotary_interleaved
    return q_nope, rotate(q_rope, cos.unsqueeze(2), sin.unsqueeze(2))


def cache_entries(latent: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What the cache holds of new tokens.

    Args:
        latent: [B, S, rank], normed.
        k_rope: [B, S, rope], not rotated.
        cos: cosines of the positions' angles, [B, S, rope / 2].
        sin: their sines, of the same shape.

    Returns:
        [B, S, rank + rope].
    """
    return torch.cat((latent, apply_rotary_interleaved(k_rope, cos, sin)), dim=-1)


def absorb(q_nope: Tensor, w_uk: Tensor) -> Tensor:
    """Queries in latent space: [B, S, H, nope] times W_UK [H, nope, rank] to [B, S, H, rank]."""
    if in_blocks(q_nope):
        return linear_heads(q_nope, w_uk)
    return torch.einsum("bshn,hnr->bshr", q_nope, w_uk)


def value_heads(summed: Tensor, w_uv: Tensor) -> Tensor:
    """Values of sums of latents: [B, S, H, rank] times W_UV [H, v_head_dim, rank] to [B, S, H, v_head_dim]."""
    if in_blocks(summed):
        return linear_heads(summed, w_uv.mT)
    return torch.einsum("bshr,hvr->bshv", summed, w_uv)


def causal_softmax(scores: Tensor, positions: Tensor, softmax_scale: float) -> Tensor:
    """Softmax over cached slots, of which a query at position p sees slots 0..p.

    Args:
        scores: [B, H, S, T] unscaled; overwritten.
        positions: int64 [B, S]; padding (negative) attends to slot 0 so that its row stays finite.
        softmax_scale: factor of the scores.

    Returns:
        [B, H, S, T], computed in float32 or wider, in the scores' dtype.
    """
    slots = torch.arange(scores.shape[-1], device=scores.device)
    hidden = slots > positions.clamp(min=0)[:, None, :, None]
    wide = torch.promote_types(scores.dtype, torch.float32)
    return (scores * softmax_scale).masked_fill_(hidden, float("-inf")).softmax(dim=-1, dtype=wide).to(scores.dtype)


@operation
def mla_absorbed_attention(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, positions: Tensor, softmax_scale: float
) -> Tensor:
    """Attention in latent space: every head reads the same cache.

    Args:
        q_latent: [B, S, H, kv_lora_rank], queries with W_UK absorbed.
        q_rope: [B, S, H, qk_rope_head_dim], rotated.
        cache: [B, T, kv_lora_rank + qk_rope_head_dim].
        positions: int64 [B, S], see `causal_softmax`.
        softmax_scale: `KimiK2Config.softmax_scale`.

    Returns:
        [B, S, H, kv_lora_rank], sums of latents, to be multiplied by W_UV.
    """
    batch, length, heads, rank = q_latent.shape
    if in_blocks(cache):
        query, keys = torch.cat((q_latent, q_rope), dim=-1), cache.unsqueeze(1)
        return attend_blocks(query, keys, keys[..., :rank], positions, softmax_scale)
    # Heads and queries form one dimension: one GEMM a sequence, which reads the cache once for all heads.
    query = torch.cat((q_latent, q_rope), dim=-1).flatten(1, 2)
    scores = torch.matmul(query, cache.mT).view(batch, length, heads, -1).transpose(1, 2)
    weights = causal_softmax(scores, positions, softmax_scale).transpose(1, 2).flatten(1, 2)
    return torch.matmul(weights, cache[..., :rank]).view(batch, length, heads, rank)


@operation
def mla_naive_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    kv_b: Tensor,
    positions: Tensor,
    softmax_scale: float,
    whole: bool = False,
) -> Tensor:
    """Attention with keys and values expanded from the cache.

    Args:
        q_nope: [B, S, H, qk_nope_head_dim].
        q_rope: [B, S, H, qk_rope_head_dim], rotated.
        cache: [B, T, kv_lora_rank + qk_rope_head_dim].
        kv_b: [H, qk_nope_head_dim + v_head_dim, kv_lora_rank], W_UK above W_UV for each head.
        positions: int64 [B, S], see `causal_softmax`.
        softmax_scale: factor of the scores.
        whole: the caller knows that the new tokens are the last S of the T slots, in order and none of them padding.

    Returns:
        [B, S, H, v_head_dim].
    """
    nope, rank = q_nope.shape[-1], kv_b.shape[-1]
    latent, k_rope = cache.split([rank, cache.shape[-1] - rank], dim=-1)
    if in_blocks(cache):
        keys, values = (
            linear_rows(latent, rows.flatten(0, 1)).unflatten(-1, rows.shape[:2]).transpose(1, 2)
            for rows in kv_b.split([nope, kv_b.shape[1] - nope], dim=1)
        )
        keys = torch.cat((keys, k_rope.unsqueeze(1).expand(-1, keys.shape[1], -1, -1)), dim=-1)
        return attend_blocks(torch.cat((q_nope, q_rope), dim=-1), keys, values, positions, softmax_scale)
    expanded = torch.matmul(latent.unsqueeze(1), kv_b.mT)  # [B, H, T, nope + v]
    scores = torch.matmul(q_nope.transpose(1, 2), expanded[..., :nope].mT)
    scores = scores + torch.matmul(q_rope.transpose(1, 2), k_rope.unsqueeze(1).mT)
    weights = causal_softmax(scores, positions, softmax_scale)
    return torch.matmul(weights, expanded[..., nope:]).transpose(1, 2)


class Ragged(NamedTuple):
    """Rows of B sequences, one sequence after the other.

    Attributes:
        lengths: rows of each, on the host.
        starts: int32 [B + 1], where each begins and where the last ends, on the rows' device.
    """

    lengths: tuple[int, ...]
    starts: Tensor


@operation(batch_invariant=COMPOSED)
def mla_ragged_attention(
    q_nope: Tensor, q_rope: Tensor, slots: Tensor, kv_b: Tensor, queries: Ragged, keys: Ragged, softmax_scale: float
) -> Tensor:
    """`mla_naive_attention` of each sequence, whose queries are the last of its slots.

    Args:
        q_nope: [T, H, qk_nope_head_dim].
        q_rope: [T, H, qk_rope_head_dim], rotated.
        slots: [S, kv_lora_rank + qk_rope_head_dim].
        kv_b: as `mla_naive_attention` takes it.
        queries: of the T rows.
        keys: of the S slots; each sequence has at least as many as queries.
        softmax_scale: factor of the scores.

    Returns:
        [T, H, v_head_dim].
    """
    parts = zip(q_nope.split(queries.lengths), q_rope.split(queries.lengths), slots.split(keys.lengths), strict=True)
    out = []
    for nope, rope, cache in parts:
        positions = torch.arange(len(cache) - len(nope), len(cache), device=cache.device).unsqueeze(0)
        given = nope.unsqueeze(0), rope.unsqueeze(0), cache.unsqueeze(0), kv_b, positions, softmax_scale
        out.append(mla_naive_attention(*given, whole=True).squeeze(0))
    return torch.cat(out)
