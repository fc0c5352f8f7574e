"""Triton kernels of `mla_prefill` and `flash_prefill`."""

from __future__ import annotations

import triton
import triton.language as tl


# Triton takes no annotations but its own.
@triton.jit
def step(  # type: ignore[no-untyped-def]
    q_nope, q_rope, keys, ropes, start, end, position, top, total, acc, scale, key_stride, rope_stride,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of slots from `start`: online softmax in base 2; slots from `end` on are neither read nor seen."""
    slot = start + tl.arange(0, BLOCK_N)
    column, rotated = tl.arange(0, 128), tl.arange(0, 64)
    key_at = keys + slot[:, None] * key_stride + column[None, :]
    rope_at = ropes + slot[:, None] * rope_stride + rotated[None, :]
    if MASKED:
        inside = (slot < end)[:, None]
        k_nope, value = tl.load(key_at, inside, 0.0), tl.load(key_at + 128, inside, 0.0)
        k_rope = tl.load(rope_at, inside, 0.0)
    else:
        k_nope, k_rope, value = tl.load(key_at), tl.load(rope_at), tl.load(key_at + 128)
    scores = tl.dot(q_nope, tl.trans(k_nope))
    scores = tl.dot(q_rope, tl.trans(k_rope), scores) * scale
    if MASKED:
        scores = tl.where(slot[None, :] <= position[:, None], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    shrink = tl.exp2(top - new_top)
    weights = tl.exp2(scores - new_top[:, None])
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(value.dtype), value, acc * shrink[:, None])
    return new_top, total, acc


@triton.jit(do_not_specialize=["queries", "slots"])
def attend(  # type: ignore[no-untyped-def]
    q_nope, q_rope, expanded, cache, positions, out, queries, slots, scale,
    nope_batch, nope_token, nope_head, rope_batch, rope_token, rope_head, cache_batch, cache_row, heads,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, KEY_ROW: tl.constexpr,
):  # fmt: skip
    """BLOCK_M queries of one head of one sequence; the last ones, which see most, are launched first.

    A head's keys and values are KEY_ROW values apart: 256 where a head's slots lie together, else those of all heads.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    query = block * BLOCK_M + tl.arange(0, BLOCK_M)
    here = query < queries
    column, rotated = tl.arange(0, 128), tl.arange(0, 64)
    # Padding (negative) sees slot 0, so that its row stays finite; past the cache's end there is nothing to see.
    position = tl.load(positions + batch * queries + query, here, 0)
    position = tl.maximum(tl.minimum(position, slots - 1), 0).to(tl.int32)
    at = q_nope + batch * nope_batch + head * nope_head + query[:, None].to(tl.int64) * nope_token
    nope = tl.load(at + column[None, :], here[:, None], 0.0)
    at = q_rope + batch * rope_batch + head * rope_head + query[:, None].to(tl.int64) * rope_token
    rope = tl.load(at + rotated[None, :], here[:, None], 0.0)
    if KEY_ROW == 256:
        keys = expanded + (batch * heads + head) * slots * 256
    else:
        keys = expanded + batch * slots * KEY_ROW + head * 256
    ropes = cache + batch * cache_batch + 512
    end = tl.max(position, 0) + 1
    # Blocks that every query sees whole need no mask.
    whole = (tl.min(tl.where(here, position, 2147483647), 0) + 1) // BLOCK_N * BLOCK_N
    whole = tl.minimum(whole, end // BLOCK_N * BLOCK_N)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, 128), tl.float32)
    for start in tl.range(0, whole, BLOCK_N, num_stages=STAGES):
        top, total, acc = step(
            nope, rope, keys, ropes, start, end, position, top, total, acc, scale, KEY_ROW, cache_row, BLOCK_N, False
        )
    for start in tl.range(whole, end, BLOCK_N, num_stages=STAGES):
        top, total, acc = step(
            nope, rope, keys, ropes, start, end, position, top, total, acc, scale, KEY_ROW, cache_row, BLOCK_N, True
        )
    acc = acc / total[:, None]
    at = out + ((batch * queries + query[:, None]) * heads + head) * 128 + column[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), here[:, None])


@triton.jit(do_not_specialize=["tokens"])
def join(  # type: ignore[no-untyped-def]
    left, right, out, tokens, heads, left_token, left_head, right_token, right_head, BLOCK: tl.constexpr
):
    """BLOCK tokens of one head: 128 values of the left, then 64 of the right."""
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    head, here = tl.program_id(1).to(tl.int64), token < tokens
    column, rotated = tl.arange(0, 128)[None, :], tl.arange(0, 64)[None, :]
    at = out + (token * heads + head) * 192
    from_left = left + head * left_head + token * left_token
    from_right = right + head * right_head + token * right_token
    tl.store(at + column, tl.load(from_left + column, here, 0.0), here)
    tl.store(at + 128 + rotated, tl.load(from_right + rotated, here, 0.0), here)


@triton.jit(do_not_specialize=["tokens"])
def spread(rotated, out, tokens, heads, token_stride, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """BLOCK tokens' 64 rotated values behind the 128 of one head."""
    token = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    head, column = tl.program_id(1).to(tl.int64), tl.arange(0, 64)[None, :]
    value = tl.load(rotated + token * token_stride + column, token < tokens, 0.0)
    tl.store(out + (token * heads + head) * 192 + 128 + column, value, token < tokens)
