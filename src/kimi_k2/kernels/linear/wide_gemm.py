"""FP8-block GEMM on the tensor cores for many tokens: `torch.ops.kimi_k2.wide_gemm`.

What `block_gemm` computes with one part of the columns, bit for bit. csrc/wide_gemm.cuh says how the launch works.
"""

from __future__ import annotations

import functools

from torch import Tensor

from kimi_k2.kernels.common.hardware import hopper
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.linear import block_gemm

TILE = 128  # tokens, and rows of the weight
# Microseconds of a tile and, by terms, of its block of 128 columns, fitted to a rank's shapes at 256 to 8192 tokens on
# an H200; and what a launch takes beyond what `block_gemm`'s model leaves out.
_LAUNCH, _TILE, _STEP = 1.0, 0.67, {1: 0.42, 2: 0.73}


def modelled_time(terms: int, tokens: int, rows: int, columns: int, sms: int) -> float:
    """Microseconds of a launch."""
    waves = -(-(-(-rows // TILE) * -(-tokens // TILE)) // sms)
    return _LAUNCH + waves * (_TILE + columns // block_gemm.BLOCK * _STEP[terms])


@functools.lru_cache(maxsize=4096)
def is_faster(terms: int, tokens: int, rows: int, columns: int, sms: int, other: block_gemm.Choice) -> bool:
    """Whether it takes less time than this launch of `block_gemm`, as modelled."""
    size = terms, tokens, rows, columns
    return modelled_time(*size, sms) < block_gemm.modelled_time(*size, other, sms)


@kernel_operation("wide_gemm")
def wide_gemm(x: Tensor, scale: Tensor, weight: Tensor, weight_scale_inv: Tensor) -> Tensor:
    """x W^T.

    Args:
        x, scale: e4m3 [terms, T, K] and float32 [K / 128, `padded(T)`], as `block_gemm.quantize_groups` gives them.
        weight: e4m3 [N, K], N a multiple of 8.
        weight_scale_inv: float32 [ceil(N / 128), K / 128].

    Returns:
        bfloat16 [T, N].

    Raises:
        KernelError: a shape or dtype that the kernel does not take, or a failed launch.
    """
    out = block_gemm.expect_operands(x, scale, weight, weight_scale_inv)
    (terms, tokens, columns), rows = x.shape, weight.shape[0]
    if tokens:
        sizes = terms, tokens, rows, columns, scale.shape[1], hopper(x.device.index, "wide_gemm")[1]
        given = x, scale, weight, weight_scale_inv, out
        launch("linear/wide_gemm", "kimi_wide_gemm", "wide_gemm", x.device, *given, *sizes)
    return out


wide_gemm.fake(block_gemm.expect_operands)
