"""FP8-block GEMM on the tensor cores for many tokens: `torch.ops.kimi_k2.wide_gemm`.

What `block_gemm` computes with as many parts of the columns, bit for bit, except by tiles whose warpgroups take turns:
they add the sums of every second block of columns to those of the others. csrc/wide_gemm.cuh says how the launch works.
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

    @property
    def turns(self) -> bool:
        """Whether two warpgroups take turns at its blocks of columns, at least one each."""
        return self.groups == 1 and self.rows > 64

    @property
    def blocks(self) -> int:
        """Blocks of an SM that run at once."""
        return 1 if self.turns or self.groups == 2 else 2

    def shared(self, cluster: int, columns: int) -> bool:
        """Whether so many blocks may share it, each a part of so many columns."""
        return (cluster == 1 or self.rows <= MOST_SHARED) and cluster * (1 + self.turns) <= columns // block_gemm.BLOCK


TILES = (
    Tile(1, 64), Tile(1, 88), Tile(1, 96), Tile(1, 128), Tile(1, 144), Tile(1, 192), Tile(2, 64), Tile(2, 128),
    Tile(2, 144), Tile(2, 192),
)  # fmt: skip
MOST_SHARED = 144  # rows of a tile that blocks may share


@kernel_operation("wide_gemm", block_gemm.PRODUCT)
def wide_gemm(
    x: Tensor, scale: Tensor, weight: Tensor, weight_scale_inv: Tensor, choice: list[int], *, out: Tensor
) -> None:
    """x W^T.

    Args:
        x, scale: as `block_gemm.quantize_groups` gives them.
        choice: of a tile of `TILES` the groups of 64 tokens and the rows, and blocks that share it, each a part of the
            columns, where the tile is `shared`.
    """
    block_gemm.launch_product("linear/wide_gemm", x, scale, weight, weight_scale_inv, choice, out)
