"""2D RoPE of the fused projection in one launch, where the plain form makes a dozen."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.hardware import has_triton


def supports_rotated_qkv(qkv: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Half precision on a GPU with Triton, contiguous within a token, nothing to differentiate."""
    return (
        all(tensor.is_cuda for tensor in (qkv, cos, sin))
        and qkv.dtype in (torch.bfloat16, torch.float16)
        and not (torch.is_grad_enabled() and qkv.requires_grad)
        and has_triton()
        and _fault(qkv, cos, sin) is None
    )


def rotated_qkv(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`ops.vision.rotated_qkv`, in place: what it returns are views of `qkv`.

    Raises:
        KernelError: another shape, dtype or layout.
    """
    if fault := _fault(qkv, cos, sin):
        raise KernelError(fault)
    from kimi_k2.kernels.vision import rotate_triton

    tokens, _, heads, size = qkv.shape
    pairs = heads * size
    width = 1 << (pairs - 1).bit_length()
    if tokens:
        rotate_triton.rotate[(tokens,)](
            qkv, cos, sin, qkv.stride(0), pairs, HEADS=heads, HALF=size // 2, WIDTH=width, num_warps=4
        )
    q, k, v = qkv.unbind(1)
    return q, k, v


def _fault(qkv: Tensor, cos: Tensor, sin: Tensor) -> str | None:
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
