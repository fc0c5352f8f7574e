"""The noaux_tc router on logits that lie as columns, as an all-reduce between SBUFs leaves them.

128 partitions share the sigmoid and the bias; one partition a token then finds the largest.
"""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.columns import BLOCK, load_columns
from kimi_k2.nki.kernels.exchange import share_of
from kimi_k2.nki.kernels.linear import finish, load_weight
from kimi_k2.nki.kernels.views import stretched

_NORM_GUARD = 1e-20
# Values that the Vector Engine finds at once.
_FOUND = 8


class ColumnRouter(nl.NKIObject):  # type: ignore[misc]
    """Choice of T tokens.

    Args:
        bias: e_score_correction_bias, float32 [1, E] in HBM, E a multiple of 128, at most 512.
        routed_scaling_factor: of the configuration.
        exact: identity, float32 [128, 128].
    """

    def __init__(self, bias: Any, routed_scaling_factor: float, exact: Any) -> None:
        self.bias = load_columns(bias, exact)
        self.factor, self.exact = routed_scaling_factor, exact

    def choose(self, sums: Any, scale: Any) -> tuple[Any, Any]:
        """Numbers uint32 [T, 8] by falling biased score, and scores as columns float32 [128, E/128, T].

        Args:
            sums: float32 [128, E/128, T], logits before the norm's scalar.
            scale: float32 [128, T], that scalar on every partition.
        """
        tokens = sums.shape[2]
        scores = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.sbuf)
        for token in range(tokens):
            factor = scale[:, token : token + 1]
            nisa.activation(dst=scores[:, :, token], op=nl.sigmoid, data=sums[:, :, token], scale=factor)
        biased = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=biased, data1=scores, data2=stretched(self.bias, tokens), op=nl.add)
        return _largest(self._rows(biased)), scores

    def weights(self, scores: Any, index: Any) -> Any:
        """Weights float32 [T, 8] of what `choose` gave."""
        rows = self._rows(scores)
        in_sbuf = nl.ndarray(rows.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=in_sbuf, src=rows, engine=nisa.engine.scalar)
        return _normalized(in_sbuf, index, self.factor)

    def _rows(self, columns: Any) -> Any:
        """Columns as rows in PSUM, float32 [T, E]."""
        chunks, tokens = columns.shape[1], columns.shape[2]
        rows = nl.ndarray((tokens, chunks * BLOCK), dtype=nl.float32, buffer=nl.psum)
        for chunk in range(chunks):
            target = rows[:, chunk * BLOCK : (chunk + 1) * BLOCK]
            nisa.nc_matmul(dst=target, stationary=columns[:, chunk, :], moving=self.exact, is_transpose=True)
        return rows


class EarlyLogits(nl.NKIObject):  # type: ignore[misc]
    """Weights of the early router in SBUF, for all experts on both cores.

    Args:
        residual_weight: float32 [n, E] in HBM, of this rank's columns of the residual (`sharding.early_router`).
        heads_weight: float32 [heads * v_head_dim, E] in HBM, of this rank's heads.

    Attributes:
        own: float32 [n, T] in SBUF, this rank's columns of this core's part of the residual.
    """

    own: Any
    total: Any
    values: Any

    def __init__(self, residual_weight: Any, heads_weight: Any) -> None:
        values, experts = heads_weight.shape
        self.experts = experts
        self.heads = values // BLOCK
        self.residual_weight = load_weight(residual_weight)
        self.own = None
        self.total = None
        self.values = None
        pattern = [[experts, BLOCK], [BLOCK * experts, self.heads], [1, experts]]
        self.heads_weight = load_weight(heads_weight.ap(pattern=pattern))

    def take_own(self, own: Any) -> None:
        """Take this rank's columns of this core's part of the residual, of an `OwnColumns`."""
        self.own = own.columns(nl.float32)

    def begin(self) -> None:
        """Begin this core's summand with its part of the residual."""
        self.total = nl.ndarray((BLOCK, self.experts // BLOCK, self.own.shape[1]), dtype=nl.float32, buffer=nl.psum)
        for chunk in range(self.experts // BLOCK):
            mine = self.residual_weight[:, chunk * BLOCK : (chunk + 1) * BLOCK]
            nisa.nc_matmul(dst=self.total[:, chunk, :], stationary=mine, moving=self.own, accumulate=False)

    def take(self, values: Any) -> None:
        """Take o_proj's input, [128, heads, T] in SBUF."""
        self.values = nl.ndarray(values.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=self.values, src=values, engine=nisa.engine.scalar)

    def end(self, out: Any, apart: bool = True, factor: Any = None) -> None:
        """Add the heads, and leave the summand in out, float32 [128, E/128, T].

        Args:
            apart: what was taken is this core's part; otherwise both cores have all of it, and each takes its chunks.
            factor: float32 [128, T, 1], by which what was taken is still to be multiplied; None: nothing.
        """
        chunks = out.shape[1]
        first, count = 0, chunks
        if not apart:
            first, count = share_of(chunks)
        sums = self.total
        residual = None
        if factor != None:
            residual = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_copy(dst=residual, src=sums, engine=nisa.engine.scalar)
            sums = nl.ndarray(sums.shape, dtype=nl.float32, buffer=nl.psum)
        for chunk in range(first, first + count):
            for head in range(self.heads):
                nisa.nc_matmul(
                    dst=sums[:, chunk, :],
                    stationary=self.heads_weight[:, head, chunk * BLOCK : (chunk + 1) * BLOCK],
                    moving=self.values[:, head, :],
                    accumulate=factor == None or head > 0,
                )
        finish(out, sums, factor, residual)


def _largest(values: Any) -> Any:
    """Numbers of the 8 largest of each row of values [T, E], by falling value, uint32 [T, 8]."""
    best = nl.ndarray((values.shape[0], _FOUND), dtype=nl.float32, buffer=nl.sbuf)
    index = nl.ndarray((values.shape[0], _FOUND), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.max8(dst=best, src=values)
    nisa.nc_find_index8(dst=index, data=values, vals=best)
    return index


def _normalized(scores: Any, index: Any, routed_scaling_factor: float) -> Any:
    """Weights float32 [T, n] of the experts uint32 [T, n], of scores [T, E]."""
    weights = nl.ndarray(index.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.nc_n_gather(dst=weights, data=scores, indices=index)
    total = nl.ndarray((index.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total, op=nl.add, data=weights, axis=1)
    nisa.tensor_scalar(dst=total, data=total, op0=nl.add, operand0=_NORM_GUARD)
    nisa.reciprocal(dst=total, data=total)
    nisa.tensor_scalar(dst=total, data=total, op0=nl.multiply, operand0=routed_scaling_factor)
    nisa.tensor_scalar(dst=weights, data=weights, op0=nl.multiply, operand0=total)
    return weights
