"""FP8-block GEMM on the tensor cores for many tokens: `torch.ops.kimi_k2.wide_gemm`.

What `block_gemm` computes with one part of the columns, bit for bit. csrc/wide_gemm.cuh says how the launch works.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kimi_k2.kernels.common.hardware import hopper
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.linear import block_gemm


class Tile(NamedTuple):
    """What a block sums at a time.

    Attributes:
        groups: of 64 tokens.
        rows: of the weight.
    """

    groups: int
    rows: int


TILES = (Tile(1, 64), Tile(1, 72), Tile(2, 64), Tile(2, 72), Tile(2, 128), Tile(2, 144), Tile(2, 192))
MOST_SHARED = 144  # rows of a tile that blocks may share


@kernel_operation("wide_gemm")
def wide_gemm(x: Tensor, scale: Tensor, weight: Tensor, weight_scale_inv: Tensor, choice: list[int]) -> Tensor:
    """x W^T.

    Args:
        x, scale: e4m3 [terms, T, K] and float32 [K / 128, `padded(T)`], as `block_gemm.quantize_groups` gives them.
        weight: e4m3 [N, K], N a multiple of 8.
        weight_scale_inv: float32 [ceil(N / 128), K / 128].
        choice: of a tile of `TILES` the groups of 64 tokens and the rows, and blocks that share it, each a part of the
            columns; one of more than `MOST_SHARED` rows is not shared.

    Returns:
        bfloat16 [T, N].

    Raises:
        KernelError: a shape or dtype that the kernel does not take, or a failed launch.
    """
    out = block_gemm.expect_operands(x, scale, weight, weight_scale_inv)
    (terms, tokens, columns), rows = x.shape, weight.shape[0]
    if tokens:
        _, sms = hopper(x.device.index, "wide_gemm")
        sizes = terms, tokens, rows, columns, scale.shape[1], *choice, sms
        operands = x, scale, weight, weight_scale_inv, out
        launch("linear/wide_gemm", "kimi_wide_gemm", "wide_gemm", x.device, *operands, *sizes)
    return out


wide_gemm.fake(block_gemm.expect_operands)
