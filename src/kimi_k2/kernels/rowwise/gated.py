"""silu(gate) * up of some tokens, and a sum: launches that begin before the one before them has ended.

PyTorch's own do not, and neither does the launch after them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.hardware import has_triton, is_hopper
from kimi_k2.kernels.common.operation import kernel_operation

MAX_TOKENS = 256  # beyond, PyTorch's launches are as fast
WIDTH = 1024


def supports(x: Tensor) -> bool:
    """A few BF16 tokens [T, N] on a Hopper GPU with Triton, nothing to differentiate."""
    differentiated = torch.is_grad_enabled() and x.requires_grad
    fits = x.dtype == torch.bfloat16 and x.dim() == 2 and 0 < x.shape[0] <= MAX_TOKENS and x.is_contiguous()
    return fits and not differentiated and is_hopper(x.device) and has_triton()


@functools.cache
def _kernels() -> Any:
    from kimi_k2.kernels.rowwise import gated_triton

    return gated_triton


def _check(gate_up: Tensor) -> Tensor:
    """The empty result, if the argument is what the kernel takes."""
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or gate_up.dtype != torch.bfloat16 or not gate_up.is_contiguous():
        raise KernelError(f"gate_up is {gate_up.dtype} {list(gate_up.shape)}, expected contiguous bfloat16 [T, 2 I]")
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@kernel_operation("silu_and_mul")
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of bfloat16 [T, 2 I], gate first: bfloat16 [T, I].

    Raises:
        KernelError: another shape or dtype.
    """
    out = _check(gate_up)
    tokens, size = out.shape
    if out.numel():
        _kernels().silu_and_mul[(-(-size // WIDTH), tokens)](
            gate_up, out, size, WIDTH=WIDTH, OVERLAP=True, num_warps=4, launch_pdl=True
        )
    return out


silu_and_mul.fake(_check)


def _check_sum(x: Tensor, y: Tensor) -> Tensor:
    if x.shape != y.shape or not x.dtype == y.dtype == torch.bfloat16 or not (x.is_contiguous() and y.is_contiguous()):
        raise KernelError(f"{x.dtype} {list(x.shape)} and {y.dtype} {list(y.shape)}: expected contiguous BF16, alike")
    return torch.empty_like(x)


@kernel_operation("add")
def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y, both contiguous bfloat16 of one shape.

    Raises:
        KernelError: other shapes or dtypes.
    """
    out = _check_sum(x, y)
    if out.numel():
        _kernels().add[(-(-out.numel() // WIDTH),)](
            x, y, out, out.numel(), WIDTH=WIDTH, OVERLAP=True, num_warps=4, launch_pdl=True
        )
    return out


add.fake(_check_sum)
