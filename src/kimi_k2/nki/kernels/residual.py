"""What lies between the collectives of a whole-layer kernel: the residual as columns, and sums over all ranks."""

from __future__ import annotations

from typing import Any

import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.columns import BLOCK, store_columns
from kimi_k2.nki.kernels.exchange import add_over_cores, share_of
from kimi_k2.nki.kernels.linear import load_weight
from kimi_k2.nki.kernels.projections import turn_short_rows


class Sum(nl.NKIObject):  # type: ignore[misc]
    """A sum over all ranks and both cores, under way: what a kernel does in between does not wait for it.

    Args:
        columns: float32 [128, n, T] in SBUF, this core's summand.
        group: all ranks.
    """

    def __init__(self, columns: Any, group: Any) -> None:
        self.total = nl.ndarray(columns.shape, dtype=nl.float32, buffer=nl.sbuf)
        flat = (BLOCK, columns.shape[1] * columns.shape[2])
        ncc.all_reduce(srcs=[columns.reshape(flat)], dsts=[self.total.reshape(flat)], replica_group=group, op=nl.add)

    def result(self) -> Any:
        """float32 [128, n, T]."""
        add_over_cores(self.total)
        return self.total


def residual_share(columns: Any, summands: int) -> Any:
    """What each core of each rank adds to a sum of so many, so that the residual is in it: of the columns' shape."""
    share = nl.ndarray(columns.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=share, data=columns, op0=nl.multiply, operand0=1.0 / summands, engine=nisa.engine.gpsimd)
    return share


class OwnColumns(nl.NKIObject):  # type: ignore[misc]
    """This rank's share of a row of columns. Where it lies depends on the rank's number, so it goes through HBM.

    Args:
        columns: float32 [128, n, T] in SBUF.
        exact: identity, float32 [128, 128].
        ranks: that share a row.
    """

    def __init__(self, columns: Any, exact: Any, ranks: int) -> None:
        chunks, tokens = columns.shape[1], columns.shape[2]
        self.exact = exact
        each = chunks * BLOCK // ranks
        table = nl.ndarray((tokens, chunks, BLOCK), dtype=nl.float32, buffer=nl.private_hbm)
        store_columns(table, columns, 0, exact, nisa.engine.scalar)
        self.rows = nl.ndarray((tokens, each), dtype=nl.float32, buffer=nl.sbuf)
        by_rank = table.reshape((tokens, ranks, each))
        pattern = [[ranks * each, tokens], [1, each]]
        mine = by_rank.ap(pattern=pattern, scalar_offset=ncc.rank_id(), indirect_dim=1)
        nisa.dma_copy(dst=self.rows, src=mine, engine=nisa.engine.scalar)

    def columns(self, dtype: Any) -> Any:
        """[n * 128 / ranks, T] of `dtype`."""
        tokens, each = self.rows.shape
        own = nl.ndarray((each, tokens), dtype=dtype, buffer=nl.sbuf)
        turn_short_rows(self.rows, self.exact, own)
        return own


class NextProjections(nl.NKIObject):  # type: ignore[misc]
    """Folded down projections of the next layer (`sharding.early_qkv_a`), of the residual and the shared expert.

    Each core has its share of the blocks of 128 columns.

    Args:
        residual_weight: [n, N] in HBM, n at most 128: of this rank's columns of the residual.
        shared_weight: [I_shared, N] in HBM.
    """

    def __init__(self, residual_weight: Any, shared_weight: Any) -> None:
        self.width = residual_weight.shape[1]
        self.blocks = (self.width + BLOCK - 1) // BLOCK
        first, count = share_of(self.blocks)
        self.first, self.count = first, count
        begin, end = first * BLOCK, min((first + count) * BLOCK, self.width)
        self.residual_weight = load_weight(residual_weight[:, begin:end])
        self.shared_weight = load_weight(shared_weight[:, begin:end])

    def add(self, own: Any, inner: Any, out: Any) -> None:
        """This core's blocks into out, float32 [128, N/128, T], which is 0.

        Args:
            own: [n, T] in SBUF, this rank's columns of the residual.
            inner: [I_shared, 1, T] in SBUF, the shared expert's inner values.
        """
        sums = nl.ndarray((BLOCK, self.count, out.shape[2]), dtype=nl.float32, buffer=nl.psum)
        for block in range(self.count):
            rows = min(BLOCK, self.width - (self.first + block) * BLOCK)
            begin, end = block * BLOCK, block * BLOCK + rows
            target = sums[0:rows, block, :]
            nisa.nc_matmul(dst=target, stationary=self.residual_weight[:, begin:end], moving=own, accumulate=False)
            weight = self.shared_weight[:, begin:end]
            nisa.nc_matmul(dst=target, stationary=weight, moving=inner[:, 0, :], accumulate=True)
        whole = min(self.count, self.width // BLOCK - self.first)
        if whole > 0:
            nisa.tensor_copy(dst=out[:, self.first : self.first + whole, :], src=sums[:, 0:whole, :])
        if whole < self.count:
            rows = self.width % BLOCK
            nisa.tensor_copy(dst=out[0:rows, self.first + whole, :], src=sums[0:rows, whole, :])
