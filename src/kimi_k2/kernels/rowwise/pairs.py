"""Sums, and silu(gate) * up, in launches that overlap with their neighbours' (csrc/pairs.cu).

They are `torch.ops.kimi_k2.add` and `silu_and_mul`, with the bits of PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.build import find_nvcc
from kimi_k2.kernels.common.hardware import is_hopper
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation

GROUP = 8  # values that a thread makes
MOST = 2**31


def _whole(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.is_contiguous() and x.data_ptr() % 16 == 0 and 0 < x.numel() < MOST


def _usable(device: torch.device) -> bool:
    return is_hopper(device) and find_nvcc() is not None


def supports_add(a: Tensor, b: Tensor) -> bool:
    """Whether `add` takes them: BF16 of one shape on a Hopper GPU, contiguous, whole groups."""
    same = a.is_cuda and a.device == b.device and a.shape == b.shape and a.numel() % GROUP == 0
    return same and _whole(a) and _whole(b) and _usable(a.device)


def supports_silu_and_mul(gate_up: Tensor) -> bool:
    """Whether `silu_and_mul` takes it: BF16 [..., 2I] on a Hopper GPU, contiguous, I whole groups."""
    whole = gate_up.is_cuda and gate_up.dim() > 0 and gate_up.shape[-1] % (2 * GROUP) == 0 and _whole(gate_up)
    return whole and _usable(gate_up.device)


def _check_add(a: Tensor, b: Tensor) -> Tensor:
    if a.shape != b.shape or a.dtype != torch.bfloat16 or b.dtype != a.dtype or a.numel() % GROUP:
        raise KernelError(
            f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}: expected bfloat16 of one shape, whole eights"
        )
    return torch.empty_like(a)


@kernel_operation("add")
def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b.

    Args:
        a, b: bfloat16 of one shape, contiguous, a multiple of eight values.
    """
    out = _check_add(a, b)
    launch("rowwise/pairs", "kimi_pairs", "add", a.device, a, b, out, a.numel() // GROUP, 1)
    return out


add.fake(_check_add)


def _check_gate_up(gate_up: Tensor) -> Tensor:
    if gate_up.dtype != torch.bfloat16 or gate_up.dim() == 0 or gate_up.shape[-1] % (2 * GROUP):
        raise KernelError(f"gate_up is {gate_up.dtype} {list(gate_up.shape)}, expected bfloat16 [..., 2I], I of 8")
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@kernel_operation("silu_and_mul")
def silu_and_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up.

    Args:
        gate_up: bfloat16 [..., 2I], contiguous, gate first, I a multiple of eight.

    Returns:
        bfloat16 [..., I].
    """
    out = _check_gate_up(gate_up)
    wide = out.shape[-1] // GROUP
    launch(
        "rowwise/pairs", "kimi_pairs", "silu_and_mul", gate_up.device, gate_up, None, out, out.numel() // GROUP, wide
    )
    return out


silu_and_mul.fake(_check_gate_up)
