"""The projector: a token's merged patches to a row of the language model's embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kimi_k2.model.vision.tower import Affine, LayerNorm
from kimi_k2.vision_config import VisionConfig


class Projector(nn.Module):
    """LayerNorm of each patch, then two Linears with an exact GELU between, over the patches side by side."""

    def __init__(self, config: VisionConfig, text_hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        merged = config.merged_size
        self.pre_norm = LayerNorm(config.hidden_size, config.projection_layer_norm_eps, dtype=dtype)
        # Names proj.0 and proj.2 are the checkpoint's.
        self.proj = nn.Sequential(
            Affine(merged, merged, dtype=dtype), nn.GELU(), Affine(merged, text_hidden_size, dtype=dtype)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, merge, D] to [tokens, text_hidden_size]."""
        out: Tensor = self.proj(self.pre_norm(x).flatten(1))
        return out
