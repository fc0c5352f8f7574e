"""Residual sum and LayerNorm, and a linear with its GELU, each one launch that touches a value once."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.kernels.common.hardware import has_triton
from kimi_k2.kernels.common.launch import triton_kernels
from kimi_k2.kernels.common.operation import kernel_operation

KINDS = "bf16|f16|f32"


def supports_add_layer_norm(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float) -> bool:
    """Half precision on a GPU with Triton, contiguous rows."""
    fits = add_layer_norm.fits(x=x, delta=delta, weight=weight, bias=bias)
    return x.is_cuda and x.dtype != torch.float32 and has_triton() and fits


@kernel_operation(
    "vision_add_layer_norm",
    f"x {KINDS}[T,D], delta {KINDS}[T,D], weight {KINDS}[D], bias {KINDS}[D] -> normed x[T,D], total x[T,D]; D <= 8192;"
    " x.dtype == delta.dtype == weight.dtype == bias.dtype",
)
def add_layer_norm(
    x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float, *, normed: Tensor, total: Tensor
) -> None:
    """`ops.vision.add_layer_norm`; the sum is rounded before the norm is taken of it, as the plain function does."""
    tokens, size = x.shape
    width = 1 << (size - 1).bit_length()
    triton_kernels("vision/rowwise").add_layer_norm[(tokens,)](
        x, delta, weight, bias, normed, total, size, eps, WIDTH=width, num_warps=4
    )


def supports_gelu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Half precision matrices on a GPU."""
    return (
        x.is_cuda
        and x.dim() == 2
        and x.dtype == weight.dtype == bias.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
    )


def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`ops.vision.gelu_linear`; the GELU is taken of the float32 sum, not of one rounded to x's dtype."""
    # PyTorch offers the epilogue under no public name.
    return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)  # noqa: SLF001
