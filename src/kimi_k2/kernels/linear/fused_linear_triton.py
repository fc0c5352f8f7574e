"""Triton kernels of `fused_linear`."""

from __future__ import annotations

import triton
import triton.language as tl


# Triton takes no annotations but its own.
@triton.jit
def gemm(  # type: ignore[no-untyped-def]
    x, weight, scale, norm, parts, tokens, rows, eps,
    COLUMNS: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One strip of ROWS rows over one part of the input dimension, 16 tokens (absent ones are zero)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    token = tl.arange(0, 16)
    row_here, token_here = row < rows, token < tokens
    if norm is not None:
        squares = tl.zeros((16,), tl.float32)
        for start in range(0, COLUMNS, 512):
            column = start + tl.arange(0, 512)
            inside = token_here[:, None] & (column < COLUMNS)[None, :]
            value = tl.load(x + token[:, None] * COLUMNS + column[None, :], inside, 0.0).to(tl.float32)
            squares += tl.sum(value * value, 1)
        rstd = tl.rsqrt(squares / COLUMNS + eps)
    total = tl.zeros((16, ROWS), tl.float32)
    first = part * (COLUMNS // SPLITS)
    offset = row.to(tl.int64) * COLUMNS
    BLOCKS: tl.constexpr = CHUNK // 128
    # A strip never crosses a scale block: ROWS divides 128.
    scale_row = tl.program_id(0) * ROWS // 128 * (COLUMNS // 128)
    for start in tl.range(first, first + COLUMNS // SPLITS, CHUNK, num_stages=3):
        column = start + tl.arange(0, CHUNK)
        a = tl.load(x + token[:, None] * COLUMNS + column[None, :], token_here[:, None], 0.0)
        if norm is not None:
            a = a.to(tl.float32) * rstd[:, None] * tl.load(norm + column)[None, :].to(tl.float32)
            a = a.to(x.dtype.element_ty)
        w = tl.load(weight + offset[:, None] + column[None, :], row_here[:, None], 0.0)
        if scale is None:
            total = tl.dot(a, tl.trans(w), total)
        else:
            s = tl.load(scale + scale_row + start // 128 + tl.arange(0, BLOCKS))
            wide = tl.reshape(w.to(tl.float32), (ROWS, BLOCKS, 128)) * s[None, :, None]
            if BLOCKS == 1:
                total += tl.dot(a, tl.trans(w.to(x.dtype.element_ty))) * tl.sum(s, 0)
            else:
                total = tl.dot(a, tl.trans(tl.reshape(wide, (ROWS, CHUNK)).to(x.dtype.element_ty)), total)
    place = parts + (part * tokens + token[:, None]) * rows + row[None, :]
    tl.store(place, total.to(parts.dtype.element_ty), token_here[:, None] & row_here[None, :])


@triton.jit
def add(  # type: ignore[no-untyped-def]
    parts, out, count, SPLITS: tl.constexpr, WIDTH: tl.constexpr
):
    """Sum of SPLITS parts of `count` values each, in order."""
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for part in range(SPLITS):
        total += tl.load(parts + part * count + at, at < count, 0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), at < count)
