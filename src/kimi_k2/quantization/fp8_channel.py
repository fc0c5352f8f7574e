"""FP8 with one float32 scale an output channel, for Trainium2's e4m3: the largest code is 240."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.quantization.neuron_e4m3 import NEURON_E4M3_MAX


def quantize_fp8_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize with scale = amax / 240 a row, round to nearest even; a row of zeros gets scale 1.

    Args:
        weight: floating [..., N, K], N output channels.

    Returns:
        (float8_e4m3fn [..., N, K], float32 scale [..., N, 1]).
    """
    plain = weight.to(torch.float32)
    amax = plain.abs().amax(dim=-1, keepdim=True)
    scale = torch.where(amax > 0, amax / NEURON_E4M3_MAX, torch.ones_like(amax))
    codes = (plain / scale).clamp_(-NEURON_E4M3_MAX, NEURON_E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, scale


def dequantize_fp8_channel(weight: Tensor, scale: Tensor) -> Tensor:
    """float32 [..., N, K] from codes [..., N, K] and scales [..., N, 1]."""
    return weight.to(torch.float32) * scale
