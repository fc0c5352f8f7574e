"""Linears over weights as they are stored, and the same joined with the norm and the residual sum before them."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.ops.norm import add_norm, rms_norm
from kimi_k2.ops.registry import COMPOSED, operation
from kimi_k2.ops.rows import linear_rows
from kimi_k2.ops.weights import Weight, dequantize, dequantize_fp8_block


@operation
def dense_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., K] times W^T for W [N, K] of the same dtype: [..., N]."""
    return linear_rows(x, weight)


@operation
def float32_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`dense_linear` whose sums a GPU does not round: x [..., K] times W^T for W [N, K], float32 [..., N] for BF16.

    A CPU's library has no such product: there the sums are BF16's. Wider dtypes stay as they are.
    """
    if x.dtype != torch.bfloat16:
        return linear_rows(x, weight)
    if x.is_cuda:
        return torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32).view(*x.shape[:-1], len(weight))
    return linear_rows(x, weight).float()


@operation
def fp8_linear(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, block_size: tuple[int, int]) -> Tensor:
    """x [..., K] times W^T for an FP8 W [N, K] with one scale a block: [..., N] in x's dtype."""
    return linear_rows(x, dequantize_fp8_block(weight, weight_scale_inv, block_size, x.dtype))


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [..., K] times W^T for W [N, K] as it is stored: [..., N] in x's dtype."""
    if (block := weight.fp8_block) is not None:
        return fp8_linear(x, weight.tensors["weight"], weight.tensors["weight_scale_inv"], block)
    return dense_linear(x, dequantize(weight, x.dtype))


@operation(batch_invariant=COMPOSED)
def project(x: Tensor, weight: Weight, norm_weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """linear(rms_norm(x)) for few tokens.

    Args:
        x: [B, K].
        weight: [N, K].
        norm_weight: [K]; None leaves the norm out.
        eps: of the norm.

    Returns:
        [B, N].
    """
    return linear(x if norm_weight is None else rms_norm(x, norm_weight, eps), weight)


@operation(batch_invariant=COMPOSED)
def add_project(
    x: Tensor, delta: Tensor | None, weight: Weight, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """linear(rms_norm(x + delta)) and x + delta for few tokens.

    Args:
        x: [B, K].
        delta: [B, K]; None is no delta.
        weight: [N, K].
        norm_weight: [K].
        eps: of the norm.

    Returns:
        [B, N] and [B, K].
    """
    if delta is None:
        return project(x, weight, norm_weight, eps), x
    total, normed = add_norm(x, delta, norm_weight, eps)
    return linear(normed, weight), total
