"""Residual sum and LayerNorm in one launch, which read and write each value once."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.hardware import has_triton

MAX_WIDTH = 8192


def supports_add_layer_norm(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float) -> bool:
    """Half precision on a GPU with Triton, contiguous rows."""
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and has_triton()
        and _fault(x, delta, weight, bias) is None
    )


def add_layer_norm(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`ops.vision.add_layer_norm`; the sum is rounded before the norm is taken of it, as the plain function does.

    Raises:
        KernelError: another shape, dtype or layout.
    """
    if fault := _fault(x, delta, weight, bias):
        raise KernelError(fault)
    from kimi_k2.kernels.vision import layer_norm_triton

    tokens, size = x.shape
    normed, total = torch.empty_like(x), torch.empty_like(x)
    if tokens:
        width = 1 << (size - 1).bit_length()
        layer_norm_triton.add_layer_norm[(tokens,)](
            x, delta, weight, bias, normed, total, size, eps, WIDTH=width, num_warps=4
        )
    return normed, total


def _fault(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor) -> str | None:
    if x.dim() != 2 or x.shape[1] > MAX_WIDTH or not x.is_contiguous():
        return f"x is {list(x.shape)}, expected contiguous [T, D], D up to {MAX_WIDTH}"
    for name, tensor, shape in (
        ("delta", delta, x.shape),
        ("weight", weight, x.shape[1:]),
        ("bias", bias, x.shape[1:]),
    ):
        if tensor.shape != shape or tensor.dtype != x.dtype or not tensor.is_contiguous():
            return f"{name} is {tensor.dtype} {list(tensor.shape)}, expected contiguous {x.dtype} {list(shape)}"
    return None
