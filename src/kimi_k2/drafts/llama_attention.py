"""Attention of the Llama form: grouped queries, rotated by halves, over a cache of keys and values side by side."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kimi_k2.config import KimiK2Config
from kimi_k2.drafts.config import DraftConfig
from kimi_k2.model.cache import LatentCache
from kimi_k2.model.linear import Linear


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pair (i, D / 2 + i) of x [B, S, H, D] by the angles whose cos and sin are [B, S, D / 2]."""
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class LlamaAttention(nn.Module):
    """Of the head's one layer, whose input is twice as wide as its output.

    Args:
        config: of the head.
        plain: `config.attention_config`.
    """

    def __init__(self, config: DraftConfig, plain: KimiK2Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.groups, self.width = config.num_attention_heads, config.num_key_value_heads, config.head_dim

        def linear(name: str, rows: int, columns: int) -> Linear:
            return Linear(plain, f"midlayer.self_attn.{name}", rows, columns, dtype=dtype)

        # Queries, keys and values in one.
        self.qkv_proj = linear("qkv_proj", (self.heads + 2 * self.groups) * self.width, 2 * config.hidden_size)
        self.o_proj = linear("o_proj", config.hidden_size, self.heads * self.width)

    @property
    def cache_dim(self) -> int:
        """Values that the cache holds of a token."""
        return 2 * self.groups * self.width

    def forward(
        self, x: Tensor, positions: Tensor, rotation: tuple[Tensor, Tensor], cache: LatentCache, length: int
    ) -> Tensor:
        """[B, S, 2 * H] to [B, S, H]; arguments as for MultiHeadLatentAttention."""
        batch, new, _ = x.shape
        both, value = self.qkv_proj(x).view(batch, new, -1, self.width).tensor_split((-self.groups,), dim=2)
        q, key = rotate_halves(both, *rotation).tensor_split((self.heads,), dim=2)
        entries = torch.cat((key, value), dim=2).flatten(2)
        held = cache.update(0, entries, positions, length).to(x.dtype)
        keys, values = held.view(batch, held.shape[1], 2, self.groups, self.width).transpose(1, 3).unbind(2)
        seen = torch.arange(held.shape[1], device=x.device) <= positions.clamp(min=0)[:, None, :, None]
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=seen, enable_gqa=self.groups != self.heads
        )
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected
