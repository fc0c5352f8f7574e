"""Drawn operands of kernels and what they should give, in float64; used by tests on a GPU and without one."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = torch.float8_e4m3fn
# Relative L2 of a value that is rounded to BF16 once, in the mean of squares; twice: 2.3e-3.
ROUNDED_ONCE = 1.8e-3
Rounding = Callable[[Tensor], Tensor]


def distance(found: Tensor, wanted: Tensor) -> float:
    """Relative L2 from float64 values."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def blocks(*shape: int, device: str = "cuda", size: float = 0.02) -> tuple[Tensor, Tensor]:
    """Random FP8 matrices [..., N, K] of about this size, and their scales, one a 128x128 block."""
    weight = torch.empty(shape, dtype=E4M3, device=device)
    for matrix in weight.view(-1, *shape[-2:]):  # one at a time: float32 takes four times the memory
        matrix.copy_((torch.randn(*shape[-2:], device=device) * 60).clamp(-448, 448))
    scale = torch.rand(*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128), device=device) + 0.5
    return weight, scale * (size / 60)


def dense(weight: Tensor, scale: Tensor | None) -> Tensor:
    """Matrices of FP8 blocks, or without scales, in float64."""
    if scale is None:
        return weight.double()
    wide = scale.double().repeat_interleave(128, -2)[..., : weight.shape[-2], :]
    return weight.double() * wide.repeat_interleave(128, -1)[..., : weight.shape[-1]]


def normed(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """RMSNorm of the last dimension."""
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each neighbouring pair of the last dimension as a complex number, by its angle."""
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos.double(), sin.double())).flatten(-2)


def bf16(x: Tensor) -> Tensor:
    """float64 values of BF16."""
    return x.bfloat16().double()


def mixture(
    x: Tensor, indices: Tensor, scores: Tensor, matrices: Callable[[int], tuple[Tensor, Tensor]], *,
    tokens: Rounding = torch.Tensor.double, weights: Rounding = torch.Tensor.double,
    middle: Rounding = torch.Tensor.double, outputs: Rounding = torch.Tensor.double,
) -> Tensor:  # fmt: skip
    """Each token's sum of its experts.

    `indices` [T, k] are of held experts, negative ones count nothing; `matrices` are an expert's [2I, H], gate rows
    first, and [H, I]. Tokens, weights, the intermediate and outputs (of each expert, and their sum) may be rounded.
    """
    out = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for chosen in indices[indices >= 0].unique().tolist():
        token, slot = torch.where(indices == chosen)
        first, second = (weights(matrix) for matrix in matrices(chosen))
        gate, up = (tokens(x[token]) @ first.T).chunk(2, -1)
        result = middle(F.silu(gate) * up) @ second.T * scores[token, slot, None].double()
        out.index_add_(0, token, outputs(result))
    return outputs(out)
