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


def routing(how: str, tokens: int, top_k: int, experts: int, device: str = "cuda") -> tuple[Tensor, Tensor]:
    """Experts of each token, and their scores.

    - whole: drawn evenly.
    - drawn: with invalid pairs, weights of zero, a padded token and a crowded expert.
    - same, third: all tokens go to the first one's, or a third of them.
    - some: pairs that share an expert, and others; crowded: one expert for every pair.
    - each: experts of 1 to `experts` tokens in random order, one a token.
    """
    indices = torch.rand(tokens, experts, device=device).topk(top_k).indices
    if how == "each":
        counts = torch.randperm(experts, device=device) + 1
        indices = torch.repeat_interleave(torch.arange(experts, device=device), counts)[:, None]
        indices = indices[torch.randperm(len(indices), device=device)].contiguous()
    scores = torch.rand(indices.shape, device=device) + 0.1
    if how == "drawn" and tokens > 1:
        indices[1, 0], scores[0, 1:][-1:] = -1, 0.0
        indices[2 : tokens // 2, 0] = 5
        scores[max(2, tokens - 1) :] = 0.0
    elif how in ("same", "third"):
        indices[: tokens if how == "same" else tokens // 3] = indices[0].clone()
    elif how == "some":
        indices[:, 0], indices[0, 1], indices[-1, -1] = 7, -1, 7
    elif how == "crowded":
        indices[:] = 5
    return indices, scores
