"""Triton kernels of `moe_bf16`: two grouped GEMMs over pairs sorted by expert, and the sum of a token's pairs."""

from __future__ import annotations

import triton
import triton.language as tl


# Triton takes no annotations but its own.
@triton.jit
def first_block(start, expert, least, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of the first block of an expert whose pairs begin at `start`.

    Every expert that has blocks has at least `least` pairs, so both bounds of the blocks before it leave room enough,
    and no other expert's count is needed. Some numbers belong to nobody.
    """
    return start // ROWS + tl.minimum(start // least, expert)


@triton.jit
def pairs_of(block, expert, order, starts, counts, least, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of a block's rows: which are pairs of its expert, their places in the order, and the pairs themselves."""
    start = tl.load(starts + expert)
    row = (block - first_block(start, expert, least, ROWS)) * ROWS + tl.arange(0, ROWS)
    here = row < tl.load(counts + expert)
    place = (start + row).to(tl.int64)
    return here, place, tl.load(order + place, here, 0).to(tl.int64)


@triton.jit
def number_blocks(  # type: ignore[no-untyped-def]
    block_expert, expert, experts, start, count, least, most, ROWS: tl.constexpr
):
    """Write an expert's blocks, and that the numbers up to the next expert's belong to nobody."""
    first = first_block(start, expert, least, ROWS)
    after = first_block(start + count, expert + 1, least, ROWS)
    within = (count >= least) & (count <= most) & (expert < experts)
    blocks = tl.where(within, tl.cdiv(count, ROWS), 0)
    for begin in range(first, after, 128):
        number = begin + tl.arange(0, 128)
        tl.store(block_expert + number, tl.where(number < first + blocks, expert, experts), number < after)


@triton.jit
def local_experts(indices, expert_map, pair, pairs, known, experts, MAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    """The pairs' experts; `experts` where one is not held."""
    inside = pair < pairs
    chosen = tl.load(indices + pair, inside, -1).to(tl.int64)
    valid = inside & (chosen >= 0) & (chosen < known)
    local = tl.load(expert_map + chosen, valid, -1).to(tl.int32) if MAPPED else chosen.to(tl.int32)
    return tl.where(valid & (local >= 0) & (local < experts), local, experts)


@triton.jit
def sort_few(  # type: ignore[no-untyped-def]
    indices, expert_map, local_out, order, starts, counts, few_blocks, many_blocks, most, pairs, known, experts,
    MAPPED: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr, MANY_ROWS: tl.constexpr,
):  # fmt: skip
    """`Order` of at most PAIRS pairs in one launch; a program an expert, and one for the pairs that are not held."""
    expert = tl.program_id(0)
    pair = tl.arange(0, PAIRS)
    inside = pair < pairs
    local = local_experts(indices, expert_map, pair, pairs, known, experts, MAPPED)
    here = inside & (local == expert)
    count = tl.sum(here.to(tl.int32), 0)
    start = tl.sum((inside & (local < expert)).to(tl.int32), 0)
    rank = tl.cumsum(here.to(tl.int32), 0) - 1
    tl.store(local_out + pair, local, here)
    tl.store(order + start + rank, pair.to(tl.int64), here)
    number_blocks(few_blocks, expert, experts, start, count, 1, most, ROWS)
    if MANY_ROWS:
        number_blocks(many_blocks, expert, experts, start, count, most + 1, 1 << 30, MANY_ROWS)
    if expert < experts:
        tl.store(starts + expert, start)
        tl.store(counts + expert, count)


@triton.jit
def count_pairs(  # type: ignore[no-untyped-def]
    indices, expert_map, local_out, counts, pairs, known, experts, MAPPED: tl.constexpr, CHUNK: tl.constexpr
):
    """The first of three launches that sort any number of pairs: counts [experts], zero before."""
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    local = local_experts(indices, expert_map, pair, pairs, known, experts, MAPPED)
    tl.store(local_out + pair, local, pair < pairs)
    tl.atomic_add(counts + local, 1, local < experts)


@triton.jit
def place_experts(  # type: ignore[no-untyped-def]
    counts, starts, cursors, few_blocks, many_blocks, most, pairs, experts,
    BINS: tl.constexpr, ROWS: tl.constexpr, MANY_ROWS: tl.constexpr,
):  # fmt: skip
    """The second: where each expert's pairs begin, and its blocks."""
    expert = tl.program_id(0)
    each = tl.arange(0, BINS)
    start = tl.sum(tl.load(counts + each, each < expert, 0), 0)
    count = pairs - start  # those that are not held
    if expert < experts:
        count = tl.load(counts + expert)
        tl.store(starts + expert, start)
        tl.store(cursors + expert, start)
    number_blocks(few_blocks, expert, experts, start, count, 1, most, ROWS)
    if MANY_ROWS:
        number_blocks(many_blocks, expert, experts, start, count, most + 1, 1 << 30, MANY_ROWS)


@triton.jit
def scatter_pairs(local, cursors, order, pairs, experts, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The third: each held pair to one of its expert's places; which one does not matter to any sum."""
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    expert = tl.load(local + pair, pair < pairs, experts)
    place = tl.atomic_add(cursors + expert, 1, expert < experts)
    tl.store(order + place, pair.to(tl.int64), expert < experts)


@triton.jit
def gate_up(  # type: ignore[no-untyped-def]
    x, weight, order, starts, counts, block_expert, least, out, top_k, experts,
    HIDDEN: tl.constexpr, INTER: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of ROWS pairs of one expert and WIDTH columns: out [pairs, INTER] by place in the order."""
    block = tl.program_id(1)
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert >= experts:
        return
    here, place, pair = pairs_of(block, expert, order, starts, counts, least, ROWS)
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
    x, weight, order, starts, counts, block_expert, least, scores, out, experts,
    HIDDEN: tl.constexpr, INTER: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The pairs' weighted outputs: out [pairs, HIDDEN] by pair."""
    block = tl.program_id(1)
    expert = tl.load(block_expert + block).to(tl.int64)
    if expert >= experts:
        return
    here, place, pair = pairs_of(block, expert, order, starts, counts, least, ROWS)
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
        is_local = tl.load(local + pair + tl.zeros_like(column)) < experts
        total += tl.load(parts + pair * HIDDEN + column, inside & is_local, 0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + column, total.to(out.dtype.element_ty), inside)
