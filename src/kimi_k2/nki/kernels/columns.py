"""Rows of activations as columns: value c * 128 + p of a row lies on partition p, chunk c, ready to be contracted."""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.views import spread, stretched

BLOCK = 128
BANK = 512  # float32 values of a partition of a PSUM bank
# Up to so many rows are loaded in pieces of 128 values, a piece a partition: one transpose turns 128 of them. More rows
# are loaded whole, a row a partition: a piece of 256 bytes would leave the DMA engines half idle.
_FEW_ROWS = 8


def load_columns(rows: Any, identity: Any) -> Any:
    """Rows in HBM [T, n * 128] as columns in SBUF: [128, n, T].

    What the engines work on at once has a DMA ring of its own, and does not queue behind weights.

    Args:
        rows: in HBM, T and n at most 128.
        identity: [128, 128] of the same dtype.
    """
    count, width = rows.shape
    chunks = width // BLOCK
    if count > _FEW_ROWS:
        whole = nl.ndarray((count, width), dtype=rows.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=whole, src=rows)
        return turn_rows(whole, identity)
    pieces = rows.reshape((count * chunks, BLOCK))
    columns = nl.ndarray((BLOCK, chunks, count), dtype=rows.dtype, buffer=nl.sbuf)
    each = BLOCK // chunks  # rows that one transpose turns
    for row in range(0, count, each):
        many = min(each, count - row)
        place, total = row * chunks, many * chunks
        loaded = nl.ndarray((total, BLOCK), dtype=rows.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=loaded, src=pieces[place : place + total], engine=nisa.engine.sync)
        turned = nl.ndarray((BLOCK, many, chunks), dtype=rows.dtype, buffer=nl.psum)
        nisa.nc_matmul(dst=turned, stationary=loaded, moving=identity[0:total, 0:total], is_transpose=True)
        target = columns.ap(pattern=[[chunks * count, BLOCK], [1, many], [count, chunks]], offset=row)
        nisa.tensor_copy(dst=target, src=turned)
    return columns


def turn_rows(rows: Any, identity: Any) -> Any:
    """Rows in SBUF [T, n * 128] as columns [128, n, T]."""
    count, width = rows.shape
    chunks = width // BLOCK
    columns = nl.ndarray((BLOCK, chunks, count), dtype=rows.dtype, buffer=nl.sbuf)
    many = max(1, BANK // count)
    for begin in range(0, chunks, many):
        size = min(many, chunks - begin)
        turned = nl.ndarray((BLOCK, size, count), dtype=rows.dtype, buffer=nl.psum)
        for chunk in range(size):
            place = (begin + chunk) * BLOCK
            nisa.nc_matmul(
                dst=turned[:, chunk, :],
                stationary=rows[:, place : place + BLOCK],
                moving=identity[0:count, 0:count],
                is_transpose=True,
            )
        nisa.tensor_copy(dst=columns[:, begin : begin + size, :], src=turned)
    return columns


def turn_columns(columns: Any, identity: Any) -> Any:
    """Columns [128, n, T] as rows in SBUF [T, n * 128], of the same dtype."""
    chunks, count = columns.shape[1], columns.shape[2]
    rows = nl.ndarray((count, chunks, BLOCK), dtype=columns.dtype, buffer=nl.sbuf)
    many = BANK // BLOCK
    for begin in range(0, chunks, many):
        size = min(many, chunks - begin)
        turned = nl.ndarray((count, size, BLOCK), dtype=columns.dtype, buffer=nl.psum)
        for chunk in range(size):
            nisa.nc_matmul(
                dst=turned[:, chunk, :], stationary=columns[:, begin + chunk, :], moving=identity, is_transpose=True
            )
        nisa.tensor_copy(dst=rows[:, begin : begin + size, :], src=turned)
    return rows.reshape((count, chunks * BLOCK))


def store_columns(out: Any, columns: Any, first: int, exact: Any, engine: Any = nisa.engine.unknown) -> None:
    """Columns float32 [128, n, T] to HBM [T, N, 128], to blocks `first` and on of each row: runs of 512 bytes.

    Args:
        columns: n at most 128.
        exact: identity [128, 128], float32.
        engine: that empties PSUM.
    """
    chunks, count = columns.shape[1], columns.shape[2]
    assert chunks <= BLOCK, "expected at most 128 blocks of a row"
    # Of whole rows, so that no transfer waits for another: what they write lies apart.
    each = BLOCK // chunks
    for begin in range(0, count, each):
        size = min(each, count - begin)
        turned = nl.ndarray((chunks * size, BLOCK), dtype=nl.float32, buffer=nl.psum)
        stationary = columns[:, :, begin : begin + size]
        nisa.nc_matmul(dst=turned, stationary=stationary, moving=exact, is_transpose=True)
        rows = nl.ndarray((chunks * size, BLOCK), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=rows, src=turned, engine=engine)
        pattern = [[BLOCK, chunks], [out.shape[1] * BLOCK, size], [1, BLOCK]]
        target = out.ap(pattern=pattern, offset=(begin * out.shape[1] + first) * BLOCK)
        nisa.dma_copy(dst=target, src=rows)


def sum_of_squares(columns: Any, out: Any = None) -> Any:
    """Of columns [128, n, T], over the n values of each row on a partition: float32 [128, T], `out` if given."""
    chunks, count = columns.shape[1], columns.shape[2]
    squares = nl.ndarray((BLOCK, count, chunks), dtype=nl.float32, buffer=nl.sbuf)
    by_partition = out
    if out == None:
        by_partition = nl.ndarray((BLOCK, count), dtype=nl.float32, buffer=nl.sbuf)
    if count == 1:  # the Scalar Engine adds up what it makes
        nisa.activation_reduce(
            dst=squares[:, 0, :], op=nl.square, data=columns[:, :, 0], reduce_op=nl.add, reduce_res=by_partition
        )
        return by_partition
    by_row = squares.ap(pattern=[[count * chunks, BLOCK], [1, chunks], [chunks, count]])
    nisa.activation(dst=by_row, op=nl.square, data=columns)
    nisa.tensor_reduce(dst=by_partition, op=nl.add, data=squares, axis=2)
    return by_partition


def norm_scalar(columns: Any, ones: Any, eps: float) -> Any:
    """rsqrt(mean(x^2) + eps) of columns [128, n, T] on every partition, float32 [128, T]; ones float32 [128, 128]."""
    chunks, count = columns.shape[1], columns.shape[2]
    total = nl.ndarray((BLOCK, count), dtype=nl.float32, buffer=nl.psum)
    sum_partitions(total, ones, sum_of_squares(columns))
    factor = nl.ndarray((BLOCK, count), dtype=nl.float32, buffer=nl.sbuf)
    inverse_root(factor, total, chunks * BLOCK, eps)
    return factor


def sum_partitions(out: Any, ones: Any, values: Any, accumulate: bool = False) -> None:
    """Sums over the partitions of values [n, ...], on every partition of out, in PSUM; ones [n, 128] of their dtype."""
    nisa.nc_matmul(dst=out, stationary=ones, moving=values, is_stationary_onezero=True, accumulate=accumulate)


def scaled(columns: Any, weight: Any, factor: Any, dtype: Any) -> Any:
    """Columns [128, n, T] times the norm's weight [128, n, 1] and factor [128, T], of `dtype`; computed in float32."""
    chunks, count = columns.shape[1], columns.shape[2]
    weighted = nl.ndarray(columns.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=weighted, data1=columns, data2=stretched(weight, count), op=nl.multiply)
    normed = nl.ndarray(columns.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=normed, data1=weighted, data2=spread(factor, chunks), op=nl.multiply)
    return normed


def inverse_root(out: Any, total: Any, size: int, eps: float) -> None:
    """out = rsqrt(total / size + eps), float32 in SBUF."""
    guard = nl.ndarray((out.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=guard, value=eps, engine=nisa.engine.gpsimd)
    nisa.activation(dst=out, op=nl.rsqrt, data=total, scale=1.0 / size, bias=guard)


def all_ones(dtype: Any = nl.float32) -> Any:
    """[128, 128] of ones: as stationary operand it sums over partitions and gives every partition the sum."""
    ones = nl.ndarray((BLOCK, BLOCK), dtype=dtype, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    return ones
