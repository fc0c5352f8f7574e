"""Residual sum and LayerNorm, rotation, and a linear with its GELU, each one launch that touches a value once."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.kernels.common.hardware import has_triton
from kimi_k2.kernels.common.line import Line

KINDS = "bf16|f16|f32"
NORM = Line(
    f"x {KINDS}[T,D], delta {KINDS}[T,D], weight {KINDS}[D], bias {KINDS}[D]; D <= 8192;"
    " x.dtype == delta.dtype == weight.dtype == bias.dtype"
)
# Queries, keys and values of a token side by side.
QKV = Line(
    f"qkv {KINDS}[T,3,H,D] rows, cos f32[T,1,D/2], sin f32[T,1,D/2]; D % 2 == 0; qkv.stride()[1:] == (H * D, D, 1)"
)


def supports_add_layer_norm(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float) -> bool:
    """Half precision on a GPU with Triton, contiguous rows."""
    fits = NORM.fits(x=x, delta=delta, weight=weight, bias=bias)
    return x.is_cuda and x.dtype != torch.float32 and has_triton() and fits


def add_layer_norm(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`ops.vision.add_layer_norm`; the sum is rounded before the norm is taken of it, as the plain function does.

    Raises:
        KernelError: another shape, dtype or layout.
    """
    NORM.bind({"x": x, "delta": delta, "weight": weight, "bias": bias})
    from kimi_k2.kernels.vision import rowwise_triton

    tokens, size = x.shape
    normed, total = torch.empty_like(x), torch.empty_like(x)
    if tokens:
        width = 1 << (size - 1).bit_length()
        rowwise_triton.add_layer_norm[(tokens,)](
            x, delta, weight, bias, normed, total, size, eps, WIDTH=width, num_warps=4
        )
    return normed, total


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
    made: Tensor = torch._addmm_activation(bias, x, weight.t(), use_gelu=True)  # noqa: SLF001
    return made


def supports_rotated_qkv(qkv: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Half precision on a GPU with Triton, contiguous within a token, nothing to differentiate."""
    return (
        all(tensor.is_cuda for tensor in (qkv, cos, sin))
        and qkv.dtype != torch.float32
        and not (torch.is_grad_enabled() and qkv.requires_grad)
        and has_triton()
        and QKV.fits(qkv=qkv, cos=cos, sin=sin)
    )


def rotated_qkv(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.vision.rotated_qkv`, in place: what it returns are views of `qkv`.

    Raises:
        KernelError: another shape, dtype or layout.
    """
    QKV.bind({"qkv": qkv, "cos": cos, "sin": sin})
    from kimi_k2.kernels.vision import rowwise_triton

    tokens, _, heads, size = qkv.shape
    pairs = heads * size
    width = 1 << (pairs - 1).bit_length()
    if tokens:
        rowwise_triton.rotate[(tokens,)](
            qkv, cos, sin, qkv.stride(0), pairs, HEADS=heads, HALF=size // 2, WIDTH=width, num_warps=4
        )
    q, k, v = qkv.unbind(1)
    return q, k, v
