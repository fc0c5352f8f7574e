"""Triton kernel of `flash_mla`."""

from __future__ import annotations

import triton
import triton.language as tl


# Triton takes no annotations but its own.
@triton.jit(do_not_specialize=["count"])
def round_values(values, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """BLOCK values in e4m3, the nearest finite ones."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + at, at < count, 0.0).to(tl.float32)
    tl.store(out + at, tl.clamp(value, -448.0, 448.0).to(tl.float8e4nv), at < count)
