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
    """All heads of one token."""
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
def _saturated(value, top):  # type: ignore[no-untyped-def]
    value = value.to(tl.float32)
    # A comparison with NaN is false: it stays.
    return tl.where(value > top, top, tl.where(value < -top, -top, value))


@triton.jit
def _turned(x, cos, sin, ROWS: tl.constexpr, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """ROWS of 2 * PAIRS values, whose pairs lie side by side."""
    even, odd = tl.split(tl.reshape(x.to(tl.float32), (ROWS, PAIRS, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, odd * cos + even * sin), (ROWS, 2 * PAIRS))


@triton.jit
def expand(  # type: ignore[no-untyped-def]
    q, kv_a, weight, cos, sin, slots, cache, entries, stride, capacity, heads, size, eps, top,
    RANK: tl.constexpr, PAIRS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """One token's queries and its entry, each rounded as `rotate`, `norm` and `store` round."""
    row, pair = tl.program_id(0).to(tl.int64), tl.arange(0, PAIRS)
    head, turned, column = tl.arange(0, HEADS)[:, None], tl.arange(0, 2 * PAIRS)[None, :], tl.arange(0, RANK)
    latent = tl.load(kv_a + row * stride + column).to(tl.float32)
    key = tl.load(kv_a + row * stride + RANK + turned)
    place = q + (row * heads + head) * size + size - 2 * PAIRS + turned
    query, slot = tl.load(place, head < heads, 0.0), tl.load(slots + row)
    c = tl.load(cos + row * PAIRS + pair).to(tl.float32)[None, :]
    s = tl.load(sin + row * PAIRS + pair).to(tl.float32)[None, :]
    quotient = latent * tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
    latent = (quotient * tl.load(weight + column).to(tl.float32)).to(entries.dtype.element_ty)
    key = _turned(key, c, s, 1, PAIRS).to(entries.dtype.element_ty)
    tl.store(place, _turned(query, c, s, HEADS, PAIRS).to(q.dtype.element_ty), head < heads)
    entry = entries + row * (RANK + 2 * PAIRS)
    tl.store(entry + column, latent)
    tl.store(entry + RANK + turned, key)
    if (slot >= 0) & (slot < capacity):
        target = cache + slot * (RANK + 2 * PAIRS)
        tl.store(target + column, _saturated(latent, top).to(cache.dtype.element_ty))
        tl.store(target + RANK + turned, _saturated(key, top).to(cache.dtype.element_ty))


@triton.jit
def store(  # type: ignore[no-untyped-def]
    entries, positions, cache, tokens, capacity, size, top, WIDTH: tl.constexpr
):
    """One entry to its slot, saturated at `top`; none for a position outside the cache."""
    row = tl.program_id(0).to(tl.int64)
    position, column = tl.load(positions + row), tl.arange(0, WIDTH)
    if (position >= 0) & (position < capacity):
        value = _saturated(tl.load(entries + row * size + column, column < size, 0.0), top)
        target = cache + (row // tokens * capacity + position) * size + column
        tl.store(target, value.to(cache.dtype.element_ty), column < size)


@triton.jit
def embed(ids, weight, out, first, rows, size, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """One token's row of those from `first` on; zeros if it is not among the `rows`."""
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    row = tl.load(ids + token).to(tl.int64) - first
    row = tl.where((row >= 0) & (row < rows), row, -1)
    value = tl.load(weight + row * size + column, (column < size) & (row + column >= column), 0.0)
    tl.store(out + token * size + column, value, column < size)
