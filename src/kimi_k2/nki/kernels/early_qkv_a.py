"""The next layer's down projections beside the experts: a rank's summand from what goes into its down projections.

The formula is that of `kimi_k2.sharding.early_qkv_a`. Weights are the moving operand, so that a token's values lie in a
row, as they are stored; routed and shared experts are one sum in PSUM.
"""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.columns import BANK
from kimi_k2.nki.kernels.exchange import share_of
from kimi_k2.nki.kernels.linear import load_weight


class EarlyColumns(nl.NKIObject):  # type: ignore[misc]
    """This core's columns of the folded weights, or all for its own tokens, and the output that they are summed into.

    Args:
        routed: [E_local, I, N] in HBM, N even at LNC=2.
        shared: [I_shared, N] in HBM, or None.
        tokens: T.
        divided: the other core has other tokens.
        begin: this core's first token.

    Attributes:
        first, count: this core's columns.
        shared_inner: [I_shared, T] in SBUF, what goes into the shared expert's down, once it is known.
        sums: [T, N] float32 in HBM.
    """

    shared: Any
    shared_inner: Any

    def __init__(self, routed: Any, shared: Any, tokens: int, divided: bool = False, begin: int = 0) -> None:
        columns = routed.shape[2]
        first, count = share_of(columns)
        if divided:
            first, count = 0, columns
        self.first, self.count, self.begin = first, count, begin
        self.routed = routed
        self.shared = None
        if shared != None:
            self.shared = load_weight(shared[:, first : first + count])
        self.shared_inner = None
        self.sums = nl.ndarray((tokens, columns), dtype=nl.float32, buffer=nl.shared_hbm)

    def store(self, token: int, tiles: list[Any], inner: Any) -> None:
        """Sum a token's values over its experts.

        Args:
            token: its number among this core's.
            tiles: of each group of experts [128, count] in SBUF.
            inner: [128, groups], what goes into their down projections, weighted, in the tiles' dtype.
        """
        last = None
        token = self.begin + token
        if self.shared != None:
            last = self.shared_inner[:, token : token + 1]
            if last.dtype != self.shared.dtype:
                rounded = nl.ndarray(last.shape, dtype=self.shared.dtype, buffer=nl.sbuf)
                nisa.tensor_copy(dst=rounded, src=last)
                last = rounded
        row = nl.ndarray((1, self.count), dtype=nl.float32, buffer=nl.sbuf)
        for begin in range(0, self.count, BANK):
            end = min(begin + BANK, self.count)
            total = nl.ndarray((1, end - begin), dtype=nl.float32, buffer=nl.psum)
            for group in range(len(tiles)):
                weight = tiles[group][:, begin:end]
                nisa.nc_matmul(dst=total, stationary=inner[:, group : group + 1], moving=weight, accumulate=group > 0)
            if last != None:
                nisa.nc_matmul(dst=total, stationary=last, moving=self.shared[:, begin:end], accumulate=True)
            nisa.tensor_copy(dst=row[:, begin:end], src=total)
        nisa.dma_copy(dst=self.sums[token : token + 1, self.first : self.first + self.count], src=row)
