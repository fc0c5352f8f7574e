"""Rotary position embedding with YaRN (Su et al. 2021, arXiv 2104.09864; Peng et al. 2023, arXiv 2309.00071)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kimi_k2.config import KimiK2Config, YarnScaling
from kimi_k2.ops.embedding import rotary_cos_sin


def _correction_range(config: KimiK2Config, yarn: YarnScaling) -> tuple[float, float]:
    """First and last pair of YaRN's ramp: pairs below keep their frequency, pairs above are interpolated.

    A pair turns `beta` times over the original context at index d ln(L / (2 pi beta)) / (2 ln theta)
    (YaRN, equations 17 to 19). With `truncate`, as published, the two are whole numbers.
    """
    dim = config.qk_rope_head_dim

    def pair_index(rotations: float) -> float:
        periods = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dim * math.log(periods) / (2 * math.log(config.rope_theta))

    low, high = pair_index(yarn.beta_fast), pair_index(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, dim - 1)


def rope_inv_freq(config: KimiK2Config, device: torch.device | str | None = None) -> Tensor:
    """Radians a position for each pair, float32 [qk_rope_head_dim / 2], YaRN applied if configured."""
    dim = config.qk_rope_head_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    pos_freqs = config.rope_theta**exponents
    if config.rope_scaling is None:
        return 1.0 / pos_freqs
    low, high = _correction_range(config, config.rope_scaling)
    width = high - low or 0.001  # a ramp without width would divide by zero
    ramp = (torch.arange(dim // 2, dtype=torch.float32, device=device) - low) / width
    keep = 1 - ramp.clamp(0, 1)
    return (1.0 / (config.rope_scaling.factor * pos_freqs)) * (1 - keep) + (1.0 / pos_freqs) * keep


class RotaryEmbedding:
    """cos and sin for given positions; holds the frequencies as a plain tensor, so no checkpoint can overwrite them."""

    def __init__(self, config: KimiK2Config, device: torch.device | str | None = None) -> None:
        self.inv_freq = rope_inv_freq(config, device)
        self.multiplier = config.rope_scaling.rotary_multiplier if config.rope_scaling else 1.0

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Positions [B, S] to (cos, sin), each [B, S, qk_rope_head_dim / 2], angles in float32, result in `dtype`."""
        self.inv_freq = self.inv_freq.to(positions.device)
        return rotary_cos_sin(positions, self.inv_freq, self.multiplier, dtype)
