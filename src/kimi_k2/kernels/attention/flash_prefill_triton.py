"""Triton kernels of `flash_prefill`."""

from __future__ import annotations

import triton
import triton.language as tl


# Triton takes no annotations but its own.
@triton.jit(do_not_specialize=["tokens"])
def join(  # type: ignore[no-untyped-def]
    left, right, out, tokens, heads, left_batch, left_token, left_head, right_batch, right_token, right_head,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK tokens of one head of one sequence: 128 values of the left, then 64 of the right."""
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    here = token < tokens
    column, rotated = tl.arange(0, 128)[None, :], tl.arange(0, 64)[None, :]
    at = out + ((batch * tokens + token) * heads + head) * 192
    from_left = left + batch * left_batch + head * left_head + token * left_token
    from_right = right + batch * right_batch + head * right_head + token * right_token
    tl.store(at + column, tl.load(from_left + column, here, 0.0), here)
    tl.store(at + 128 + rotated, tl.load(from_right + rotated, here, 0.0), here)


@triton.jit(do_not_specialize=["tokens"])
def spread(  # type: ignore[no-untyped-def]
    rotated, out, tokens, heads, batch_stride, token_stride, BLOCK: tl.constexpr
):
    """BLOCK tokens' 64 rotated values behind the 128 of one head of one sequence."""
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    here = token < tokens
    column = tl.arange(0, 64)[None, :]
    value = tl.load(rotated + batch * batch_stride + token * token_stride + column, here, 0.0)
    tl.store(out + ((batch * tokens + token) * heads + head) * 192 + 128 + column, value, here)
