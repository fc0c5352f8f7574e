"""Triton kernels of `rowwise`."""

from __future__ import annotations

import triton
import triton.language as tl


# Triton takes no annotations but its own.
@triton.jit
def dequantize(  # type: ignore[no-untyped-def]
    weight, scale, out, rows, columns, scale_columns, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """ROWS rows of WIDTH columns, which lie in one block of 128x128."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    factor = tl.load(scale + tl.program_id(0) * ROWS // 128 * scale_columns + tl.program_id(1) * WIDTH // 128)
    value = tl.load(weight + at, inside, 0.0).to(tl.float32) * factor
    tl.store(out + at, value.to(out.dtype.element_ty), inside)


@triton.jit
def norm(x, weight, out, stride, size, eps, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """One row, rounded once: the plain norm rounds the quotient before its weight is applied, too."""
    column = tl.arange(0, WIDTH)
    inside = column < size
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(x + row * stride + column, inside, 0.0).to(tl.float32)
    quotient = value * tl.rsqrt(tl.sum(value * value, 0) / size + eps)
    scaled = quotient * tl.load(weight + column, inside, 0.0).to(tl.float32)
    tl.store(out + row * size + column, scaled.to(out.dtype.element_ty), inside)


@triton.jit
def rotate(  # type: ignore[no-untyped-def]
    x, cos, sin, out, tokens, heads, batch_stride, token_stride, head_stride, out_batch, out_token, out_head,
    PAIRS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """All heads of one token; `out` may be x."""
    row = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, HEADS), tl.arange(0, PAIRS)
    inside = (head < heads)[:, None] & (pair < PAIRS)[None, :]
    c, s = tl.load(cos + row * PAIRS + pair).to(tl.float32), tl.load(sin + row * PAIRS + pair).to(tl.float32)
    source = x + row // tokens * batch_stride + row % tokens * token_stride
    source += head[:, None] * head_stride + 2 * pair[None, :]
    even, odd = tl.load(source, inside, 0.0).to(tl.float32), tl.load(source + 1, inside, 0.0).to(tl.float32)
    target = out + row // tokens * out_batch + row % tokens * out_token + head[:, None] * out_head + 2 * pair[None, :]
    tl.store(target, (even * c - odd * s).to(out.dtype.element_ty), inside)
    tl.store(target + 1, (odd * c + even * s).to(out.dtype.element_ty), inside)


@triton.jit
def store(  # type: ignore[no-untyped-def]
    entries, positions, cache, tokens, capacity, size, top, WIDTH: tl.constexpr
):
    """One entry to its slot, saturated at `top`; none for a position outside the cache."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    slot = tl.where(position < capacity, position, -1)
    column = tl.arange(0, WIDTH)
    value = tl.load(entries + row * size + column, column < size, 0.0).to(tl.float32)
    # A comparison with NaN is false: it stays.
    value = tl.where(value > top, top, tl.where(value < -top, -top, value))
    # A mask of the stored shape: Triton 3.9's interpreter takes no scalar one.
    inside = (slot + column >= column) & (column < size)
    target = cache + (row // tokens * capacity + position) * size + column
    tl.store(target, value.to(cache.dtype.element_ty), inside)


@triton.jit
def embed(ids, weight, out, first, rows, size, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """One token's row of those from `first` on; zeros if it is not among the `rows`."""
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    row = tl.load(ids + token).to(tl.int64) - first
    row = tl.where((row >= 0) & (row < rows), row, -1)
    value = tl.load(weight + row * size + column, (column < size) & (row + column >= column), 0.0)
    tl.store(out + token * size + column, value, column < size)
