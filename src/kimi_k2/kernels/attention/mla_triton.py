"""Triton kernels of `mla_decode`: attention over parts of the context, then the parts joined in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def step(
    q_latent: tl.tensor, q_rope: tl.tensor, latent: tl.tensor, rope: tl.tensor, here: tl.tensor,
    top: tl.tensor, total: tl.tensor, acc: tl.tensor, scale: tl.tensor, MASKED: tl.constexpr, NARROW: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """One block of cache rows: online softmax in base 2; the latent is key and value, read once.

    NARROW puts the cache rows (and then the latent's columns) along the 64 rows of a wgmma and the few heads along its
    columns: nothing is computed for absent heads, and the queries stay in shared memory.
    """
    if NARROW:
        scores = tl.dot(latent, tl.trans(q_latent))
        scores = tl.dot(rope, tl.trans(q_rope), scores) * scale
        if MASKED:
            scores = tl.where(here[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 0))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[None, :])
        total = total * shrink + tl.sum(weights, 0)
        acc = tl.dot(tl.trans(latent), weights.to(latent.dtype), acc * shrink[None, :])
    else:
        scores = tl.dot(q_latent, tl.trans(latent))
        scores = tl.dot(q_rope, tl.trans(rope), scores) * scale
        if MASKED:
            scores = tl.where(here[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(latent.dtype), latent, acc * shrink[:, None])
    return new_top, total, acc


@triton.jit
def first_row(
    table: tl.tensor, request: tl.tensor, start: tl.tensor, table_stride: tl.tensor, capacity: tl.tensor,
    PAGED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Row of the cache, flattened to [rows, 576], that holds position `start`, the first of a block within a page."""
    if PAGED:
        page = tl.load(table + request.to(tl.int64) * table_stride + start // 64)
        return page.to(tl.int64) * 64 + start % 64
    return request.to(tl.int64) * capacity + start


@triton.jit
def last_rows(cache: tl.tensor, base: tl.tensor, here: tl.tensor, BLOCK_N: tl.constexpr) -> tl.tensor:
    """Latents and rotated keys of the rows from `base` on that are `here`, zeros elsewhere."""
    place = cache + (base + tl.arange(0, BLOCK_N))[:, None] * 576
    latent = tl.load(place + tl.arange(0, 512)[None, :], here[:, None], 0.0)
    return latent, tl.load(place + 512 + tl.arange(0, 64)[None, :], here[:, None], 0.0)


@triton.jit(do_not_specialize=["table_stride", "capacity", "splits"])
def attend(
    q: tl.tensor, cache: tl.tensor, latents: tl.tensor, ropes: tl.tensor, table: tl.tensor, lengths: tl.tensor,
    out: tl.tensor, parts: tl.tensor, sums: tl.tensor,
    heads: tl.tensor, table_stride: tl.tensor, capacity: tl.tensor, scale: tl.tensor, cache_scale: tl.tensor,
    splits: tl.tensor, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, SINGLE: tl.constexpr, PAGED: tl.constexpr,
    TMA: tl.constexpr, STAGES: tl.constexpr, NARROW: tl.constexpr, QUANTIZED: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_H heads of one request over one of `splits` parts of its context.

    Writes the normalised part and the base-2 logarithm of its sum of exponentials (-inf for an empty part, whose values
    are left unwritten); with one part, the result. Only the last block of a context is masked: what lies past its end,
    NaN too, is never multiplied. Of a QUANTIZED cache, values are times `cache_scale`, which `scale` contains.
    """
    split, request = tl.program_id(0), tl.program_id(2)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    within = head < heads
    row = request.to(tl.int64) * heads + head
    column, rotated = tl.arange(0, 512), 512 + tl.arange(0, 64)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    length = tl.minimum(tl.load(lengths + request), capacity)
    blocks = tl.cdiv(length, BLOCK_N)
    begin, end = blocks * split // splits * BLOCK_N, tl.minimum(blocks * (split + 1) // splits * BLOCK_N, length)
    if end <= begin:
        if SINGLE:
            empty = tl.zeros((BLOCK_H, 512), out.dtype.element_ty)
            tl.store(out + row[:, None] * 512 + column[None, :], empty, within[:, None])
        else:
            tl.store(sums + row * splits + split, tl.full((BLOCK_H,), float("-inf"), tl.float32), within)
        return
    q_latent = tl.load(q + row[:, None] * 576 + column[None, :], within[:, None], 0.0)
    q_rope = tl.load(q + row[:, None] * 576 + rotated[None, :], within[:, None], 0.0)
    top = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_H,), tl.float32)
    acc = tl.zeros((512, BLOCK_H) if NARROW else (BLOCK_H, 512), tl.float32)
    slot = tl.arange(0, BLOCK_N)
    whole = begin + (end - begin) // BLOCK_N * BLOCK_N
    for start in tl.range(begin, whole, BLOCK_N, num_stages=STAGES):
        base = first_row(table, request, start, table_stride, capacity, PAGED)
        if TMA:
            latent = latents.load([base.to(tl.int32), 0])
            rope = ropes.load([base.to(tl.int32), 512])
        else:
            place = cache + (base + slot)[:, None] * 576
            latent = tl.load(place + column[None, :])
            rope = tl.load(place + rotated[None, :])
        latent, rope = latent.to(q_latent.dtype), rope.to(q_latent.dtype)
        top, total, acc = step(q_latent, q_rope, latent, rope, slot < 0, top, total, acc, scale, False, NARROW)
    if NARROW:
        # At most one block; a loop, because only a loop's loads go straight to shared memory.
        for start in tl.range(whole, end, BLOCK_N, num_stages=2):
            base = first_row(table, request, start, table_stride, capacity, PAGED)
            here = slot < end - start
            latent, rope = last_rows(cache, base, here, BLOCK_N)
            latent, rope = latent.to(q_latent.dtype), rope.to(q_latent.dtype)
            top, total, acc = step(q_latent, q_rope, latent, rope, here, top, total, acc, scale, True, True)
    elif whole < end:
        base = first_row(table, request, whole, table_stride, capacity, PAGED)
        here = slot < end - whole
        latent, rope = last_rows(cache, base, here, BLOCK_N)
        latent, rope = latent.to(q_latent.dtype), rope.to(q_latent.dtype)
        top, total, acc = step(q_latent, q_rope, latent, rope, here, top, total, acc, scale, True, False)
    if NARROW:
        acc = tl.trans(acc)
    acc = acc / total[:, None]
    if QUANTIZED:
        acc *= cache_scale
    if SINGLE:
        tl.store(out + row[:, None] * 512 + column[None, :], acc.to(out.dtype.element_ty), within[:, None])
    else:
        place = parts + (row * splits + split)[:, None] * 512 + column[None, :]
        tl.store(place, acc.to(parts.dtype.element_ty), within[:, None])
        tl.store(sums + row * splits + split, top + tl.log2(total), within)


@triton.jit(do_not_specialize=["splits"])
def join(
    parts: tl.tensor, sums: tl.tensor, out: tl.tensor, splits: tl.tensor, PADDED: tl.constexpr, WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """WIDTH columns of one head of one request: the parts weighed by their sums, added in a fixed order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    split = tl.arange(0, PADDED)
    if OVERLAP:
        gdc_wait()
    # Parts that were not written are read, so that no load waits for another, and then dropped.
    value = tl.load(parts + (row * splits + split)[:, None] * 512 + column[None, :], (split < splits)[:, None], 0.0)
    logs = tl.load(sums + row * splits + split, split < splits, float("-inf"))
    top = tl.max(logs, 0)
    # A context of length zero: every part is empty and the result is zero.
    top = tl.where(top == float("-inf"), 0.0, top)
    weight = tl.exp2(logs - top)
    total = tl.sum(weight, 0)
    acc = tl.sum(tl.where((weight > 0.0)[:, None], value * weight[:, None], 0.0), 0)
    acc = tl.where(total > 0.0, acc / total, 0.0)
    tl.store(out + row * 512 + column, acc.to(out.dtype.element_ty))
