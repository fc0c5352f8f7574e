"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), naive and with absorbed weights.

The cache holds, for each token, the normed latent c (kv_lora_rank) and one rotary key shared by all heads. The naive
form expands every cached latent to keys and values. The absorbed form moves kv_b_proj to the other side:
q_nope . (W_UK c) = (W_UK^T q_nope) . c, and the value projection W_UV is applied after the weighted sum of latents.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kimi_k2.config import KimiK2Config
from kimi_k2.model.cache import LatentCache
from kimi_k2.model.linear import Linear
from kimi_k2.model.norm import RMSNorm
from kimi_k2.model.rope import apply_rotary_interleaved
from kimi_k2.ops.registry import dispatched


def causal_softmax(scores: Tensor, positions: Tensor, softmax_scale: float) -> Tensor:
    """Softmax over cached slots, of which a query at position p sees slots 0..p.

    Args:
        scores: [B, H, S, T] unscaled; overwritten.
        positions: int64 [B, S]; padding (negative) attends to slot 0 so that its row stays finite.

    Returns:
        [B, H, S, T], computed in float32 or wider, in the scores' dtype.
    """
    slots = torch.arange(scores.shape[-1], device=scores.device)
    hidden = slots > positions.clamp(min=0)[:, None, :, None]
    wide = torch.promote_types(scores.dtype, torch.float32)
    return (scores * softmax_scale).masked_fill_(hidden, float("-inf")).softmax(dim=-1, dtype=wide).to(scores.dtype)


@dispatched("mla_absorbed_attention")
def mla_absorbed_attention(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, positions: Tensor, softmax_scale: float
) -> Tensor:
    """Attention in latent space: every head reads the same cache.

    Args:
        q_latent: [B, S, H, kv_lora_rank], queries with W_UK absorbed.
        q_rope: [B, S, H, qk_rope_head_dim], turned.
        cache: [B, T, kv_lora_rank + qk_rope_head_dim].
        positions: int64 [B, S], see `causal_softmax`.
        softmax_scale: `KimiK2Config.softmax_scale`.

    Returns:
        [B, S, H, kv_lora_rank], sums of latents, to be multiplied by W_UV.
    """
    batch, length, heads, rank = q_latent.shape
    # Heads and queries form one dimension: a single matrix product a sequence, the cache read once for all heads.
    query = torch.cat((q_latent, q_rope), dim=-1).flatten(1, 2)
    scores = torch.matmul(query, cache.mT).view(batch, length, heads, -1).transpose(1, 2)
    weights = causal_softmax(scores, positions, softmax_scale).transpose(1, 2).flatten(1, 2)
    return torch.matmul(weights, cache[..., :rank]).view(batch, length, heads, rank)


@dispatched("mla_naive_attention")
def mla_naive_attention(
    q_nope: Tensor, q_rope: Tensor, cache: Tensor, kv_b: Tensor, positions: Tensor, softmax_scale: float
) -> Tensor:
    """Attention with keys and values expanded from the cache.

    Args:
        q_nope: [B, S, H, qk_nope_head_dim].
        q_rope: [B, S, H, qk_rope_head_dim], turned.
        cache: [B, T, kv_lora_rank + qk_rope_head_dim].
        kv_b: [H, qk_nope_head_dim + v_head_dim, kv_lora_rank], W_UK above W_UV for each head.
        positions: int64 [B, S], see `causal_softmax`.

    Returns:
        [B, S, H, v_head_dim].
    """
    nope, rank = q_nope.shape[-1], kv_b.shape[-1]
    latent, k_rope = cache.split([rank, cache.shape[-1] - rank], dim=-1)
    expanded = torch.matmul(latent.unsqueeze(1), kv_b.mT)  # [B, H, T, nope + v]
    scores = torch.matmul(q_nope.transpose(1, 2), expanded[..., :nope].mT)
    scores = scores + torch.matmul(q_rope.transpose(1, 2), k_rope.unsqueeze(1).mT)
    weights = causal_softmax(scores, positions, softmax_scale)
    return torch.matmul(weights, expanded[..., nope:]).transpose(1, 2)


def absorbed_is_cheaper(config: KimiK2Config, queries: int, length: int) -> bool:
    """Whether the absorbed form needs fewer multiply-adds a head for `queries` new tokens over `length` slots."""
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    absorbed = queries * rank * (nope + value) + queries * length * (2 * rank + rope)
    naive = length * rank * (nope + value) + queries * length * (nope + rope + value)
    return absorbed < naive


class MultiHeadLatentAttention(nn.Module):
    """MLA of one decoder layer.

    Args:
        form: `auto` takes the form that needs fewer operations at each call, `naive` or `absorbed` pins one.
    """

    def __init__(
        self,
        config: KimiK2Config,
        layer: int,
        *,
        dtype: torch.dtype,
        keep_quantized: bool = False,
        form: str = "auto",
    ) -> None:
        super().__init__()
        if form not in ("auto", "naive", "absorbed"):
            raise ValueError(f"form: expected auto, naive or absorbed, got {form!r}")
        self.config, self.layer, self.form = config, layer, form
        root, heads, hidden = (
            f"model.layers.{layer}.self_attn",
            config.num_attention_heads,
            config.hidden_size,
        )

        def linear(name: str, rows: int, columns: int) -> Linear:
            return Linear(config, f"{root}.{name}", rows, columns, dtype=dtype, keep_quantized=keep_quantized)

        kv_b_rows = heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.q_a_proj = linear("q_a_proj", config.q_lora_rank, hidden)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.latent_norm_eps, dtype=dtype)
        self.q_b_proj = linear("q_b_proj", heads * config.qk_head_dim, config.q_lora_rank)
        self.kv_a_proj_with_mqa = linear("kv_a_proj_with_mqa", config.cache_dim, hidden)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.latent_norm_eps, dtype=dtype)
        self.kv_b_proj = linear("kv_b_proj", kv_b_rows, config.kv_lora_rank)
        self.o_proj = linear("o_proj", hidden, heads * config.v_head_dim)

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
        batch, new, _ = x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(batch, new, -1, config.qk_head_dim)
        q_nope, q_rope = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        cos, sin = rotation
        q_rope = apply_rotary_interleaved(q_rope, cos.unsqueeze(2), sin.unsqueeze(2))

        latent, k_rope = self.kv_a_proj_with_mqa(x).split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        entries = torch.cat((self.kv_a_layernorm(latent), apply_rotary_interleaved(k_rope, cos, sin)), dim=-1)
        slots = entries if cache is None else cache.update(self.layer, entries, positions, length).to(x.dtype)

        kv_b = self.kv_b_proj.dequantized(x.dtype).view(
            -1, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank
        )
        absorbed = self.form == "absorbed" or (self.form == "auto" and absorbed_is_cheaper(config, new, slots.shape[1]))
        if absorbed:
            w_uk, w_uv = kv_b.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            q_latent = torch.einsum("bshn,hnr->bshr", q_nope, w_uk)
            summed = mla_absorbed_attention(q_latent, q_rope, slots, positions, config.softmax_scale)
            out = torch.einsum("bshr,hvr->bshv", summed, w_uv)
        else:
            out = mla_naive_attention(q_nope, q_rope, slots, kv_b, positions, config.softmax_scale)
        return self.o_proj(out.flatten(2))
