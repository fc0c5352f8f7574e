"""Triton kernels of `gated`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


# Triton takes no annotations but its own.
@triton.jit
def silu_and_mul(  # type: ignore[no-untyped-def]
    gate_up, out, size, WIDTH: tl.constexpr, OVERLAP: tl.constexpr
):
    """WIDTH columns of one token; silu is rounded before the product, as in the plain function."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    token, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = column < size
    gate = tl.load(gate_up + token * 2 * size + column, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * size + size + column, inside, 0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * size + column, (silu * up).to(out.dtype.element_ty), inside)


@triton.jit
def add(x, y, out, size, WIDTH: tl.constexpr, OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """WIDTH values."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = at < size
    value = tl.load(x + at, inside, 0.0).to(tl.float32) + tl.load(y + at, inside, 0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), inside)
