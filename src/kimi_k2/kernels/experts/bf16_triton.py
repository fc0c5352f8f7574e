"""Triton kernels of `moe_bf16`: two grouped GEMMs over pairs sorted by expert, and the sum of a token's pairs."""

from __future__ import annotations

import triton
import triton.language as tl


# Triton takes no annotations but its own.
@triton.jit
def pairs_of(block, expert, order, starts, counts, block_ends, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a block's rows: which are pairs of its expert, their places in the order, and the pairs themselves."""
    count = tl.load(counts + expert)
    row = (block - tl.load(block_ends + expert) + tl.cdiv(count, ROWS)) * ROWS + tl.arange(0, ROWS)
    here = row < count
    place = (tl.load(starts + expert) + row).to(tl.int64)
    return here, place, tl.load(order + place, here, 0).to(tl.int64)


@triton.jit
def sort_few(  # type: ignore[no-untyped-def]
    indices, expert_map, local_out, order, block_expert, starts, counts, block_ends, pairs, known, experts,
    MAPPED: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """`Order` of at most PAIRS pairs in one launch; a program an expert, and one for the pairs that are not held.

    An expert's blocks are numbered from its first pair's place on, so a block's number needs no other expert's blocks;
    numbers in between belong to none.
    """
    expert = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    inside = pair < pairs
    chosen = tl.load(indices + pair, inside, -1).to(tl.int64)
    valid = inside & (chosen >= 0) & (chosen < known)
    local = tl.load(expert_map + chosen, valid, -1).to(tl.int32) if MAPPED else chosen.to(tl.int32)
    local = tl.where(valid & (local >= 0) & (local < experts), local, experts)
    here = inside & (local == expert)
    count = tl.sum(here.to(tl.int32), 0)
    start = tl.sum((inside & (local < expert)).to(tl.int32), 0)
    rank = tl.cumsum(here.to(tl.int32), 0) - 1
    blocks = tl.cdiv(count, ROWS)
    tl.store(local_out + pair, local, here)
    tl.store(order + start + rank, pair.to(tl.int64), here)
    tl.store(block_expert + start + rank, tl.where(rank < blocks, expert, experts), here)
    if expert < experts:
        tl.store(starts + expert, start)
        tl.store(counts + expert, count)
        tl.store(block_ends + expert, start + blocks)


@triton.jit
def gate_up(  # type: ignore[no-untyped-def]
    x, weight, order, block_expert, starts, counts, block_ends, out, top_k, experts,
    HIDDEN: tl.constexpr, INTER: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of ROWS pairs of one expert and WIDTH columns: out [pairs, INTER] by place in the order."""
    block = tl.program_id(1)
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert >= experts:
        return
    here, place, pair = pairs_of(block, expert, order, starts, counts, block_ends, ROWS)
    token = pair // top_k
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    gates = weight + (expert * 2 * INTER + column).to(tl.int64) * HIDDEN
    step = tl.arange(0, STEP)
    gate = tl.zeros((ROWS, WIDTH), tl.float32)
    up = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, HIDDEN, STEP):
        a = tl.load(x + token[:, None] * HIDDEN + (start + step)[None, :], here[:, None], 0.0)
        at = gates[:, None] + (start + step)[None, :]
        gate = tl.dot(a, tl.trans(tl.load(at)), gate)
        up = tl.dot(a, tl.trans(tl.load(at + INTER * HIDDEN)), up)
    value = gate * tl.sigmoid(gate) * up
    target = out + place[:, None] * INTER + column[None, :]
    tl.store(target, value.to(out.dtype.element_ty), here[:, None])


@triton.jit
def down(  # type: ignore[no-untyped-def]
    x, weight, order, block_expert, starts, counts, block_ends, scores, out, experts,
    HIDDEN: tl.constexpr, INTER: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The pairs' weighted outputs: out [pairs, HIDDEN] by pair."""
    block = tl.program_id(1)
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert >= experts:
        return
    here, place, pair = pairs_of(block, expert, order, starts, counts, block_ends, ROWS)
    column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    rows = weight + (expert * HIDDEN + column).to(tl.int64) * INTER
    step = tl.arange(0, STEP)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in range(0, INTER, STEP):
        a = tl.load(x + place[:, None] * INTER + (start + step)[None, :], here[:, None], 0.0)
        total = tl.dot(a, tl.trans(tl.load(rows[:, None] + (start + step)[None, :])), total)
    total *= tl.load(scores + pair, here, 0.0)[:, None]
    tl.store(out + pair[:, None] * HIDDEN + column[None, :], total.to(out.dtype.element_ty), here[:, None])


@triton.jit
def combine(  # type: ignore[no-untyped-def]
    parts, local, out, top_k, experts, HIDDEN: tl.constexpr, WIDTH: tl.constexpr
):
    """Sum of a token's pairs whose expert is held, in order, WIDTH columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = column < HIDDEN
    total = tl.zeros((WIDTH,), tl.float32)
    for slot in range(top_k):
        pair = token * top_k + slot
        # A mask of the loaded shape: Triton 3.9's interpreter takes no scalar one.
        held = tl.load(local + pair + tl.zeros_like(column)) < experts
        total += tl.load(parts + pair * HIDDEN + column, inside & held, 0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + column, total.to(out.dtype.element_ty), inside)
