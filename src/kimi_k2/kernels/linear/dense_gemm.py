"""BF16 GEMM whose rows have the same bits for any number of tokens: `torch.ops.kimi_k2.dense_gemm`.

For batch-invariant mode, where cuBLAS will not do: its kernel, and with it the order of a sum, follows the number of
tokens. And for few tokens, as it asks for its weights before the launch ahead of it has ended, which cuBLAS does not.
csrc/dense_gemm.cuh says how the launch works.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.kernels.common.hardware import runs_cuda
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation

STEP = 64
CLUSTERS = (8, 4, 2, 1)
# Blocks that a step of few tokens is to have at most, and columns of each at least.
BLOCKS, COLUMNS = 144, 4 * STEP
# Tokens of the narrowest tile, and columns from which on two blocks share them whatever the number of rows: a head of
# 20,480 rows takes 74 us in two parts and 77 in one.
FEW, LONG = 16, 4096


def supports(x: Tensor, weight: Tensor) -> bool:
    """BF16 tokens [..., K] and a BF16 weight [N, K] on a Hopper GPU with nvcc, K a multiple of 64, N of 8."""
    fits = x.dtype == weight.dtype and x.shape[-1] == weight.shape[1]
    return fits and dense_gemm.fits(weight=weight) and runs_cuda(x.device)


def decode_cluster(rows: int, columns: int) -> int:
    """Parts of the columns for a step of few tokens, by the weight's shape alone."""
    tiles = -(-rows // 64)
    return next((cluster for cluster in CLUSTERS if tiles * cluster <= BLOCKS and columns >= cluster * COLUMNS), 1)


def fastest_cluster(tokens: int, rows: int, columns: int) -> int:
    """Parts of the columns for up to 64 tokens where their number may change bits."""
    parts = decode_cluster(rows, columns)
    if tokens > FEW:
        return max(1, parts // 2)  # a block then takes longer over its part
    return max(2, parts) if columns >= LONG else parts


@kernel_operation(
    "dense_gemm",
    "x bf16[T,K] rows16, weight bf16[N,K], inverse f32[T]? -> out D[T,N]; K % 64 == 0; N % 8 == 0;"
    " 1 <= cluster <= min(8, K // 64); T < 2 or x.stride(0) >= K",
    also=lambda wide: {"D": torch.float32 if wide else torch.bfloat16},
)
def dense_gemm(
    x: Tensor, weight: Tensor, cluster: int, wide: bool = False, inverse: Tensor | None = None, *, out: Tensor
) -> None:
    """x W^T, summed in float32.

    Args:
        cluster: parts of the columns that are summed apart: the bits depend on it, and on nothing else but the row.
        wide: float32 result.
        inverse: times which a row's sums are taken before they are rounded.
    """
    (tokens, columns), rows = x.shape, weight.shape[0]
    sizes = tokens, rows, columns, x.stride(0) if tokens > 1 else columns, cluster, int(wide)
    launch("linear/dense_gemm", "kimi_dense_gemm", "dense_gemm", x.device, x, weight, inverse, out, *sizes)
