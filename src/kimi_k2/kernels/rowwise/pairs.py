"""Sums, and silu(gate) * up, in launches that overlap with their neighbours' (csrc/pairs.cu).

They are `torch.ops.kimi_k2.add` and `silu_and_mul`, with the bits of PyTorch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.kernels.common.hardware import runs_cuda
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation

GROUP = 8  # values that a thread makes
MOST = 2**31


def _whole(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.is_contiguous() and x.data_ptr() % 16 == 0 and 0 < x.numel() < MOST


def supports_add(a: Tensor, b: Tensor) -> bool:
    """Whether `add` takes them: BF16 of one shape on a Hopper GPU, contiguous, whole groups."""
    same = a.is_cuda and a.device == b.device and a.shape == b.shape and a.numel() % GROUP == 0
    return same and _whole(a) and _whole(b) and runs_cuda(a.device)


def supports_silu_and_mul(gate_up: Tensor) -> bool:
    """Whether `silu_and_mul` takes it: BF16 [..., 2I] on a Hopper GPU, contiguous, I whole groups."""
    whole = gate_up.is_cuda and gate_up.dim() > 0 and gate_up.shape[-1] % (2 * GROUP) == 0 and _whole(gate_up)
    return whole and runs_cuda(gate_up.device)


@kernel_operation("add", "a bf16[*S], b bf16[*S] -> out bf16[*S]; a.numel() % 8 == 0")
def add(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """a + b."""
    launch("rowwise/pairs", "kimi_pairs", "add", a.device, a, b, out, a.numel() // GROUP, 1)


@kernel_operation("silu_and_mul", "gate_up bf16[*S,G] -> out bf16[*S,G/2]; G % 16 == 0")
def silu_and_mul(gate_up: Tensor, *, out: Tensor) -> None:
    """silu(gate) * up, gate first."""
    sizes = out.numel() // GROUP, out.shape[-1] // GROUP
    launch("rowwise/pairs", "kimi_pairs", "silu_and_mul", gate_up.device, gate_up, None, out, *sizes)
