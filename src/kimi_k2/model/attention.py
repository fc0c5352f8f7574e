"""The attention module: MLA's projections around the functions of `ops.mla`, in the form that is cheaper."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kimi_k2.config import KimiK2Config
from kimi_k2.model.cache import LatentCache
from kimi_k2.model.linear import Linear, RMSNorm, add_modules
from kimi_k2.ops.mla import (
    absorb,
    cache_entries,
    mla_absorbed_attention,
    mla_naive_attention,
    rotated_queries,
    value_heads,
)
from kimi_k2.ops.registry import batch_invariant


def absorbed_is_cheaper(config: KimiK2Config, queries: int, length: int) -> bool:
    """Whether the absorbed form needs fewer multiply-adds a head for `queries` new tokens over `length` slots."""
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    absorbed = queries * rank * (nope + value) + queries * length * (2 * rank + rope)
    naive = length * rank * (nope + value) + queries * length * (nope + rope + value)
    return absorbed < naive


class MultiHeadLatentAttention(nn.Module):
    """MLA of one decoder layer, at each call in the form that needs fewer operations."""

    q_a_proj: Linear
    q_a_layernorm: RMSNorm
    q_b_proj: Linear
    kv_a_proj_with_mqa: Linear
    kv_a_layernorm: RMSNorm
    kv_b_proj: Linear
    o_proj: Linear

    def __init__(
        self,
        config: KimiK2Config,
        layer: int,
        *,
        dtype: torch.dtype,
        keep_quantized: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        add_modules(self, config, layer, "self_attn", dtype=dtype, keep_quantized=keep_quantized)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        rotation: tuple[Tensor, Tensor],
        cache: LatentCache | None,
        length: int,
    ) -> Tensor:
        """Attend from new tokens to the cache, which takes their entries first.

        Args:
            x: [B, S, H], normed hidden states.
            positions: int64 [B, S], negative for padding.
            rotation: (cos, sin) at these positions, each [B, S, qk_rope_head_dim / 2].
            cache: None to attend within x alone, whose positions must then be 0..S-1.
            length: number of cache slots to attend over, at least the largest position + 1.

        Returns:
            [B, S, H].
        """
        config = self.config
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        heads = q.unflatten(-1, (-1, config.qk_head_dim))
        q_nope, q_rope = rotated_queries(heads, config.qk_nope_head_dim, *rotation)
        entries = cache_entries(self.kv_a_layernorm(latent), k_rope, *rotation)
        slots = entries if cache is None else cache.update(self.layer, entries, positions, length).to(q.dtype)
        values = self.over(q_nope, q_rope, slots, self.kv_b(q.dtype), positions)
        projected: Tensor = self.o_proj(values.flatten(2))
        return projected

    def over(self, q_nope: Tensor, q_rope: Tensor, slots: Tensor, kv_b: Tensor, positions: Tensor) -> Tensor:
        """Attention over cached slots, in the form that is cheaper; arguments and result as `mla_naive_attention`'s."""
        config = self.config
        # Which form is cheaper depends on how a prompt is cut: in batch-invariant mode it is always the same one.
        if not batch_invariant() and absorbed_is_cheaper(config, q_nope.shape[1], slots.shape[1]):
            w_uk, w_uv = kv_b.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            q_latent = absorb(q_nope, w_uk)
            return value_heads(mla_absorbed_attention(q_latent, q_rope, slots, positions, config.softmax_scale), w_uv)
        return mla_naive_attention(q_nope, q_rope, slots, kv_b, positions, config.softmax_scale)

    def kv_b(self, dtype: torch.dtype) -> Tensor:
        """kv_b_proj by head: [H, qk_nope_head_dim + v_head_dim, kv_lora_rank], W_UK above W_UV."""
        config = self.config
        rows = config.qk_nope_head_dim + config.v_head_dim
        return self.kv_b_proj.dequantized(dtype).view(-1, rows, config.kv_lora_rank)
