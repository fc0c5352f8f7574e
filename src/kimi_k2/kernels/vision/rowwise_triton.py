"""Triton kernels of `rowwise`."""

from __future__ import annotations

import triton
import triton.language as tl


# Triton takes no annotations but its own.
@triton.jit
def add_layer_norm(  # type: ignore[no-untyped-def]
    x, delta, weight, bias, normed, total, size, eps, WIDTH: tl.constexpr
):
    """One row."""
    column = tl.arange(0, WIDTH)
    inside = column < size
    at = tl.program_id(0).to(tl.int64) * size + column
    value = tl.load(x + at, inside, 0.0).to(tl.float32) + tl.load(delta + at, inside, 0.0).to(tl.float32)
    value = value.to(total.dtype.element_ty)
    tl.store(total + at, value, inside)
    value = value.to(tl.float32)
    mean = tl.sum(value, 0) / size
    apart = tl.where(inside, value - mean, 0.0)
    inverse = tl.rsqrt(tl.sum(apart * apart, 0) / size + eps)
    scale, shift = (
        tl.load(weight + column, inside, 0.0).to(tl.float32),
        tl.load(bias + column, inside, 0.0).to(tl.float32),
    )
    tl.store(normed + at, (apart * inverse * scale + shift).to(normed.dtype.element_ty), inside)
