"""BF16 GEMM whose rows have the same bits for any number of tokens: `torch.ops.kimi_k2.dense_gemm`.

For batch-invariant mode, where cuBLAS will not do: its kernel, and with it the order of a sum, follows the number of
tokens. And for few tokens, as it asks for its weights before the launch ahead of it has ended, which cuBLAS does not.
csrc/dense_gemm.cuh says how the launch works.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.build import find_nvcc
from kimi_k2.kernels.common.hardware import is_hopper
from kimi_k2.kernels.common.launch import expect, launch
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
    return (
        x.dtype == weight.dtype == torch.bfloat16
        and is_hopper(x.device)
        and weight.is_contiguous()
        and x.shape[-1] == weight.shape[1]
        and weight.shape[1] % STEP == 0
        and weight.shape[0] % 8 == 0
        and find_nvcc() is not None
    )


def decode_cluster(rows: int, columns: int) -> int:
    """Parts of the columns for a step of few tokens, by the weight's shape alone."""
    tiles = -(-rows // 64)
    return next((one for one in CLUSTERS if tiles * one <= BLOCKS and columns >= one * COLUMNS), 1)


def fastest_cluster(tokens: int, rows: int, columns: int) -> int:
    """Parts of the columns for up to 64 tokens where their number may change bits."""
    parts = decode_cluster(rows, columns)
    if tokens > FEW:
        return max(1, parts // 2)  # a block then takes longer over its part
    return max(2, parts) if columns >= LONG else parts


def _row_stride(x: Tensor) -> int:
    return x.stride(0) if x.shape[0] > 1 else x.shape[1]


def _check(x: Tensor, weight: Tensor, cluster: int, wide: bool, inverse: Tensor | None) -> Tensor:
    """The empty result, if the arguments are what the kernel takes."""
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[1] % STEP or weight.shape[0] % 8:
        raise KernelError(
            f"x {list(x.shape)} and weight {list(weight.shape)}: expected [T, K] and [N, K], K a multiple of {STEP}, N"
            " of 8"
        )
    if cluster not in range(1, min(8, weight.shape[1] // STEP) + 1):
        raise KernelError(f"cluster {cluster}: expected 1 to 8, at most a block for {STEP} columns")
    stride = _row_stride(x)
    aligned = x.stride(1) == 1 and stride % 8 == 0 and stride >= x.shape[1] and x.storage_offset() % 8 == 0
    if x.shape[1] != weight.shape[1] or x.dtype != torch.bfloat16 or not aligned:
        raise KernelError(
            f"x is {x.dtype} {tuple(x.shape)}, expected torch.bfloat16 {(x.shape[0], weight.shape[1])}, rows of whole"
            " 16 bytes"
        )
    expect("weight", weight, x.device, tuple(weight.shape), torch.bfloat16)
    if inverse is not None:
        expect("inverse", inverse, x.device, (x.shape[0],), torch.float32)
    return torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32 if wide else torch.bfloat16, device=x.device)


@kernel_operation("dense_gemm")
def dense_gemm(x: Tensor, weight: Tensor, cluster: int, wide: bool = False, inverse: Tensor | None = None) -> Tensor:
    """x W^T, summed in float32.

    Args:
        x: bfloat16 [T, K], K a multiple of 64, rows may be strided.
        weight: bfloat16 [N, K], N a multiple of 8.
        cluster: parts of the columns that are summed apart: the bits depend on it, and on nothing else but the row.
        wide: float32 result.
        inverse: float32 [T], times which a row's sums are taken before they are rounded.

    Returns:
        bfloat16 or float32 [T, N].

    Raises:
        KernelError: a shape or dtype that the kernel does not take, or a failed launch.
    """
    out = _check(x, weight, cluster, wide, inverse)
    if x.shape[0]:
        sizes = x.shape[0], weight.shape[0], x.shape[1], _row_stride(x), cluster, int(wide)
        launch("linear/dense_gemm", "kimi_dense_gemm", "dense_gemm", x.device, x, weight, inverse, out, *sizes)
    return out


dense_gemm.fake(_check)
