"""Residual sum and LayerNorm, rotation, and a linear with its GELU, each one launch that touches a value once."""

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
    from kimi_k2.kernels.vision import rowwise_triton

    tokens, size = x.shape
    normed, total = torch.empty_like(x), torch.empty_like(x)
    if tokens:
        width = 1 << (size - 1).bit_length()
        rowwise_triton.add_layer_norm[(tokens,)](
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
        and qkv.dtype in (torch.bfloat16, torch.float16)
        and not (torch.is_grad_enabled() and qkv.requires_grad)
        and has_triton()
        and _rotation_fault(qkv, cos, sin) is None
    )


def rotated_qkv(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.vision.rotated_qkv`, in place: what it returns are views of `qkv`.

    Raises:
        KernelError: another shape, dtype or layout.
    """
    if fault := _rotation_fault(qkv, cos, sin):
        raise KernelError(fault)
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


def _rotation_fault(qkv: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    if qkv.dim() != 4 or qkv.shape[1] != 3 or qkv.shape[3] % 2:
        return f"qkv is {list(qkv.shape)}, expected [T, 3, H, D] with D even"
    size = qkv.shape[3]
    if qkv.stride()[1:] != (qkv.shape[2] * size, size, 1):
        return f"qkv has strides {qkv.stride()}, expected queries, keys and values of a token side by side"
    for name, tensor in (("cos", cos), ("sin", sin)):
        wanted = (qkv.shape[0], 1, size // 2)
        if tuple(tensor.shape) != wanted or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            return f"{name} is {tensor.dtype} {list(tensor.shape)}, expected contiguous float32 {list(wanted)}"
    return None
