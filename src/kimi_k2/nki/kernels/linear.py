"""A linear layer over columns: weights stationary, so that few tokens cost few cycles; block scales after the PE."""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.columns import BLOCK
from kimi_k2.nki.kernels.halves import in_parts, joined, parts_of

_PARTS = 3  # of a float32 value


def load_weight(tiles: Any, tile: Any = None) -> Any:
    """A weight in HBM [P, K, N] in SBUF, a run a partition; in `tile` where one is given."""
    if tile is None:
        tile = nl.ndarray(tiles.shape, dtype=tiles.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=tiles)
    return tile


def project(
    columns: Any, weight: Any, scales: Any, dtype: Any, factor: Any = None, out: Any = None, beside: Any = None
) -> Any:
    """weight^T . columns: [min(N, 128), ceil(N / 128), T] of `dtype`, summed in float32.

    Args:
        columns: [P, K, T] in SBUF; P * K values of each of T tokens. Float32 beside a narrower weight is multiplied as
            three BF16 parts, which hold all of it.
        weight: [P, K, N] in SBUF, wide as the columns are or narrower.
        scales: None, or float32 [min(N, 128), ceil(N / 128), K] in SBUF: of each output row and each chunk of inputs.
        dtype: of the result.
        factor: float32 [128, T] in SBUF, by which each token's sums are multiplied.
        out: where the result goes, of `dtype`, in SBUF; None: a new tile.
        beside: what is added then, of the result's shape in SBUF; None: nothing.
    """
    count, width = columns.shape[2], weight.shape[2]
    rows, pieces = min(width, BLOCK), -(-width // BLOCK)
    if width > BLOCK and width % BLOCK:
        raise ValueError(f"expected a weight of at most {BLOCK} or of a multiple of {BLOCK} columns, got {width}")
    result = nl.ndarray((rows, pieces, count), dtype=dtype, buffer=nl.sbuf) if out is None else out
    parts = parts_of(columns, weight.itemsize, _PARTS)
    if parts > 1:
        columns = in_parts(columns, weight.itemsize, _PARTS).reshape((*columns.shape[:2], count * parts))
        sums = joined(project(columns, weight, scales, nl.float32), parts)
        finish(result, sums, factor, beside)
        return result
    if scales is None:
        _summed(columns, weight, factor, result, beside)
        return result
    _scaled(columns, weight, scales, result)
    if factor is not None:
        _multiply(result, result, factor)
    if beside is not None:
        nisa.tensor_tensor(dst=result, data1=result, data2=beside, op=nl.add)
    return result


def _multiply(out: Any, sums: Any, factor: Any) -> None:
    """Sums [n, pieces, T], each token times its factor."""
    rows, pieces, _ = sums.shape
    factors = factor[0:rows].expand_dim(1).broadcast(1, pieces)
    nisa.tensor_tensor(dst=out, data1=sums, data2=factors, op=nl.multiply)


def finish(out: Any, sums: Any, factor: Any, beside: Any) -> None:
    """Sums [n, pieces, T] into SBUF, as `project` has it."""
    rows, _, count = out.shape
    if factor is None:
        if beside is None:
            nisa.tensor_copy(dst=out, src=sums)
        else:
            nisa.tensor_tensor(dst=out, data1=sums, data2=beside, op=nl.add)
    elif beside is None:
        _multiply(out, sums, factor)
    elif count == 1:
        nisa.scalar_tensor_tensor(
            dst=out, data=sums, op0=nl.multiply, operand0=factor[0:rows], op1=nl.add, operand1=beside
        )
    else:
        _multiply(out, sums, factor)
        nisa.tensor_tensor(dst=out, data1=out, data2=beside, op=nl.add)


def _summed(columns: Any, weight: Any, factor: Any, result: Any, beside: Any) -> None:
    rows, pieces, count = result.shape
    chunks = weight.shape[1]
    many = nl.tile_size.psum_bank_fmax // count
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
        mine = slice(begin, begin + size)
        finish(result[:, mine, :], sums, factor, None if beside is None else beside[:, mine, :])


def _scaled(columns: Any, weight: Any, scales: Any, result: Any) -> None:
    """Each chunk's sums lie side by side in PSUM, are scaled, and then added."""
    rows, pieces, count = result.shape
    chunks = weight.shape[1]
    at_once = max(1, nl.tile_size.psum_bank_fmax // chunks)  # columns of the result a PSUM bank
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
            factors = scales[:, first : first + size, :].expand_dim(2).broadcast(2, tokens)
            nisa.tensor_tensor(dst=scaled, data1=parts, data2=factors, op=nl.multiply)
            target = result[:, first : first + size, begin : begin + tokens]
            nisa.tensor_reduce(dst=target, op=nl.add, data=scaled, axis=3)
