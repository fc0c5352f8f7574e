"""FP8-block GEMM on the tensor cores for many tokens: `torch.ops.kimi_k2.wide_gemm`.

What `block_gemm` computes with one part of the columns, bit for bit. csrc/wide_gemm.cuh says how the launch works.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

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


@kernel_operation("wide_gemm", block_gemm.PRODUCT)
def wide_gemm(
    x: Tensor, scale: Tensor, weight: Tensor, weight_scale_inv: Tensor, choice: list[int], *, out: Tensor
) -> None:
    """x W^T.

    Args:
        x, scale: as `block_gemm.quantize_groups` gives them.
        choice: of a tile of `TILES` the groups of 64 tokens and the rows, and blocks that share it, each a part of the
            columns; one of more than `MOST_SHARED` rows is not shared.
    """
    block_gemm.launch_product("linear/wide_gemm", x, scale, weight, weight_scale_inv, choice, out)
