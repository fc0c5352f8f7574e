"""Sums, and silu(gate) * up, in launches that overlap with their neighbours' (csrc/pairs.cu).

They are `torch.ops.kimi_k2.add` and `silu_and_mul`, with the bits of PyTorch.
"""

from __future__ import annotations

from torch import Tensor

from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation

GROUP = 8  # values that a thread makes
MOST = 2**31


def supports_add(a: Tensor, b: Tensor) -> bool:
    """Whether `add` takes them, on a Hopper GPU."""
    return 0 < a.numel() < MOST and add.takes(a, b)


def supports_silu_and_mul(gate_up: Tensor) -> bool:
    """Whether `silu_and_mul` takes it, on a Hopper GPU."""
    return 0 < gate_up.numel() < MOST and silu_and_mul.takes(gate_up)


@kernel_operation(
    "add",
    "a bf16[*S], b bf16[*S] -> out bf16[*S]; a.numel() % 8 == 0; (a.storage_offset() | b.storage_offset()) % 8 == 0",
)
def add(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """a + b."""
    launch("rowwise/pairs", "kimi_pairs", "add", a.device, a, b, out, a.numel() // GROUP, 1)


@kernel_operation(
    "silu_and_mul", "gate_up bf16[*S,G] -> out bf16[*S,G/2]; G % 16 == 0; gate_up.storage_offset() % 8 == 0"
)
def silu_and_mul(gate_up: Tensor, *, out: Tensor) -> None:
    """silu(gate) * up, gate first."""
    sizes = out.numel() // GROUP, out.shape[-1] // GROUP
    launch("rowwise/pairs", "kimi_pairs", "silu_and_mul", gate_up.device, gate_up, None, out, *sizes)
