"""A linear layer over columns: weights stationary, so that few tokens cost few cycles; block scales after the PE."""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.columns import BANK, BLOCK


def load_weight(tiles: Any, tile: Any = None) -> Any:
    """A weight in HBM [P, K, N] in SBUF, a run a partition; in `tile` where one is given."""
    if tile == None:
        tile = nl.ndarray(tiles.shape, dtype=tiles.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=tiles)
    return tile


def project(
    columns: Any, weight: Any, scales: Any, dtype: Any, factor: Any = None, out: Any = None, beside: Any = None,
    head: int = 0,
) -> Any:  # fmt: skip
    """weight^T . columns: [min(N, 128), ceil(N / 128), T] of `dtype`, summed in float32.

    Args:
        columns: [P, K, T] in SBUF; P * K values of each of T tokens.
        weight: [P, K, N] in SBUF, float32 where the columns are; N at most 128 or a multiple of it.
        scales: None, or float32 [min(N, 128), ceil(N / 128) or more, K] in SBUF: of each output row and each chunk of
            inputs.
        dtype: of the result.
        factor: float32 [128, T, heads] in SBUF, by which each token's sums are multiplied: those of `head`; not
            with `scales`.
        out: where the result goes, of `dtype`, in SBUF; None: a new tile.
        beside: what is added then, of the result's shape in SBUF, beside a factor of one token; None: nothing.
        head: see `factor`.
    """
    count, width = columns.shape[2], weight.shape[2]
    rows, pieces = min(width, BLOCK), (width + BLOCK - 1) // BLOCK
    assert width <= BLOCK or width % BLOCK == 0, "expected a weight of at most 128 or of a multiple of 128 columns"
    result = out
    if out == None:
        result = nl.ndarray((rows, pieces, count), dtype=dtype, buffer=nl.sbuf)
    if scales == None:
        _summed(columns, weight, factor, result, beside, head)
        return result
    _scaled(columns, weight, scales, result)
    if beside != None:
        nisa.tensor_tensor(dst=result, data1=result, data2=beside, op=nl.add)
    return result


def _multiply(out: Any, sums: Any, factor: Any, head: int) -> None:
    """Sums [n, pieces, T], each token times its factor."""
    rows, pieces, count = sums.shape
    heads = factor.shape[2]
    factors = factor.ap(pattern=[[count * heads, rows], [0, pieces], [heads, count]], offset=head)
    nisa.tensor_tensor(dst=out, data1=sums, data2=factors, op=nl.multiply)


def finish(out: Any, sums: Any, factor: Any, beside: Any, head: int = 0) -> None:
    """Sums [n, pieces, T] into SBUF, as `project` has it."""
    rows = out.shape[0]
    if factor == None:
        if beside == None:
            nisa.tensor_copy(dst=out, src=sums)
        else:
            nisa.tensor_tensor(dst=out, data1=sums, data2=beside, op=nl.add)
    elif beside == None:
        _multiply(out, sums, factor, head)
    else:  # of one token
        own = factor[0:rows, 0, head : head + 1]
        nisa.scalar_tensor_tensor(dst=out, data=sums, op0=nl.multiply, operand0=own, op1=nl.add, operand1=beside)


def _summed(columns: Any, weight: Any, factor: Any, result: Any, beside: Any, head: int) -> None:
    rows, pieces, count = result.shape
    chunks = weight.shape[1]
    many = BANK // count
    for begin in range(0, pieces, many):
        size = min(many, pieces - begin)
        sums = nl.ndarray((rows, size, count), dtype=nl.float32, buffer=nl.psum)
        for piece in range(size):
            place = (begin + piece) * BLOCK
            for chunk in range(chunks):
                nisa.nc_matmul(
                    dst=sums[:, piece, :],
                    stationary=weight[:, chunk, place : place + rows],
                    moving=columns[:, chunk, :],
                    accumulate=chunk > 0,
                )
        added = beside
        if beside != None:
            added = beside[:, begin : begin + size, :]
        finish(result[:, begin : begin + size, :], sums, factor, added, head)


def _scaled(columns: Any, weight: Any, scales: Any, result: Any) -> None:
    """Each chunk's sums lie side by side in PSUM, are scaled, and then added."""
    rows, pieces, count = result.shape
    chunks = weight.shape[1]
    at_once = max(1, BANK // chunks)  # columns of the result a PSUM bank
    for begin in range(0, count, at_once):
        tokens = min(at_once, count - begin)
        many = max(1, at_once // tokens)
        for first in range(0, pieces, many):
            size = min(many, pieces - first)
            parts = nl.ndarray((rows, size, tokens, chunks), dtype=nl.float32, buffer=nl.psum)
            for piece in range(size):
                place = (first + piece) * BLOCK
                for chunk in range(chunks):
                    nisa.nc_matmul(
                        dst=parts[:, piece, :, chunk],
                        stationary=weight[:, chunk, place : place + rows],
                        moving=columns[:, chunk, begin : begin + tokens],
                        accumulate=False,
                    )
            scaled = nl.ndarray((rows, size, tokens, chunks), dtype=nl.float32, buffer=nl.sbuf)
            factors = scales.ap(
                pattern=[[scales.shape[1] * chunks, rows], [chunks, size], [0, tokens], [1, chunks]],
                offset=first * chunks,
            )
            nisa.tensor_tensor(dst=scaled, data1=parts, data2=factors, op=nl.multiply)
            target = result[:, first : first + size, begin : begin + tokens]
            nisa.tensor_reduce(dst=target, op=nl.add, data=scaled, axis=3)
