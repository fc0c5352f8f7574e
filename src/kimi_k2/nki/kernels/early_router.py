"""The router's logits in the all-reduce of the attention's output: a rank's summand.

The formula is that of `kimi_k2.sharding.early_router`. All of it is in float32.
"""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.columns import BLOCK
from kimi_k2.nki.kernels.exchange import share_of
from kimi_k2.nki.kernels.linear import load_weight
from kimi_k2.nki.kernels.projections import turn_short_rows


class EarlyRouter(nl.NKIObject):  # type: ignore[misc]
    """Weights in SBUF; each core has its share of the experts.

    Args:
        residual_weight: float32 [n, E] in HBM, n at most 128: this rank's rows of (W_gate diag(gamma))^T.
        heads_weight: float32 [heads * 128, E] in HBM, E at most 512.
        residual: [B, n] in HBM, this rank's columns of what the attention's norm was given.
        identity: [128, 128] of residual's dtype.
    """

    def __init__(self, residual_weight: Any, heads_weight: Any, residual: Any, identity: Any) -> None:
        values, experts = heads_weight.shape
        self.experts = experts
        self.heads = values // BLOCK
        first, count = share_of(experts)
        self.first, self.count = first, count
        self.residual_weight = load_weight(residual_weight[:, first : first + count])
        pattern = [[experts, BLOCK], [BLOCK * experts, self.heads], [1, count]]
        self.heads_weight = load_weight(heads_weight.ap(pattern=pattern, offset=first))
        count, rows = residual.shape
        loaded = nl.ndarray((count, rows), dtype=residual.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=loaded, src=residual)
        self.columns = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
        turn_short_rows(loaded, identity, self.columns)

    def store(self, values: Any) -> Any:
        """This rank's summand in a new tensor in HBM, float32 [B, E].

        Args:
            values: [128, heads, B] in SBUF, o_proj's input.
        """
        count = values.shape[2]
        sums = nl.ndarray((count, self.experts), dtype=nl.float32, buffer=nl.shared_hbm)
        wide = nl.ndarray(values.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=wide, src=values)
        total = nl.ndarray((count, self.residual_weight.shape[1]), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=total, stationary=self.columns, moving=self.residual_weight, accumulate=False)
        for head in range(self.heads):
            nisa.nc_matmul(
                dst=total, stationary=wide[:, head, :], moving=self.heads_weight[:, head, :], accumulate=True
            )
        part = nl.ndarray(total.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=part, src=total)
        nisa.dma_copy(dst=sums[:, self.first : self.first + self.count], src=part)
        return sums
