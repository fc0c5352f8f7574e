"""Triton kernels of `rope_cache`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


# Triton takes no annotations but its own.
@triton.jit
def _store_entry(  # type: ignore[no-untyped-def]
    kv, norm, slots, cache, token, c, s, kv_stride, capacity, eps, stored,
    ROPE: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """A token's cache entry, with the cosines and sines of its position."""
    pair, column = tl.arange(0, ROPE // 2), tl.arange(0, RANK)
    slot = tl.load(slots + token)
    slot = tl.where(slot < capacity, slot, -1)
    # Masks of the stored shape: Triton 3.9's interpreter takes no scalar one.
    row_here, pair_here = slot + column >= column, slot + pair >= pair
    latent = tl.load(kv + token * kv_stride + column).to(tl.float32)
    quotient = latent * tl.rsqrt(tl.sum(latent * latent, 0) / RANK + eps)
    entry = cache + slot * (RANK + ROPE)
    entry_latent = quotient * tl.load(norm + column).to(tl.float32) * stored
    tl.store(entry + column, entry_latent.to(cache.dtype.element_ty), row_here)
    source = kv + token * kv_stride + RANK + 2 * pair
    even, odd = tl.load(source).to(tl.float32), tl.load(source + 1).to(tl.float32)
    tl.store(entry + RANK + 2 * pair, ((even * c - odd * s) * stored).to(cache.dtype.element_ty), pair_here)
    tl.store(entry + RANK + 2 * pair + 1, ((odd * c + even * s) * stored).to(cache.dtype.element_ty), pair_here)


@triton.jit
def absorb(  # type: ignore[no-untyped-def]
    q, kv, norm, cos, sin, slots, w_uk, query, cache, batch, kv_stride, capacity, eps, stored,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr,
    TOKENS: tl.constexpr, OVERLAP: tl.constexpr, JOBS: tl.constexpr,
):  # fmt: skip
    """Groups of TOKENS tokens: JOBS programs of WIDTH columns of one head's latent queries, then one a token.

    Those make the heads' RoPE and the cache entry, stored `stored` times its value in one of `capacity` slots. OVERLAP:
    W_UK, which no launch changes, is asked for before the launch that makes q has ended.
    """
    job, group = tl.program_id(0), tl.program_id(1)
    parts: tl.constexpr = RANK // WIDTH
    if job < JOBS:
        head, column = job // parts, job % parts * WIDTH + tl.arange(0, WIDTH)
        row, token = tl.arange(0, NOPE), group * TOKENS + tl.arange(0, TOKENS)
        here = (token < batch)[:, None]
        w = tl.load(w_uk + (head * NOPE + row[:, None]) * RANK + column[None, :])
        if OVERLAP:
            gdc_wait()
            gdc_launch_dependents()
        a = tl.load(q + (token[:, None] * HEADS + head) * (NOPE + ROPE) + row[None, :], here, 0.0)
        place = query + (token[:, None] * HEADS + head) * (RANK + ROPE) + column[None, :]
        tl.store(place, tl.dot(a, w).to(query.dtype.element_ty), here)
        return
    token = group * TOKENS + job - JOBS
    if token >= batch:
        return
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    pair, head = tl.arange(0, ROPE // 2), tl.arange(0, HEADS)
    c = tl.load(cos + token * (ROPE // 2) + pair).to(tl.float32)
    s = tl.load(sin + token * (ROPE // 2) + pair).to(tl.float32)
    source = q + (token * HEADS + head[:, None]) * (NOPE + ROPE) + NOPE + 2 * pair[None, :]
    even, odd = tl.load(source).to(tl.float32), tl.load(source + 1).to(tl.float32)
    place = query + (token * HEADS + head[:, None]) * (RANK + ROPE) + RANK + 2 * pair[None, :]
    tl.store(place, (even * c[None, :] - odd * s[None, :]).to(query.dtype.element_ty))
    tl.store(place + 1, (odd * c[None, :] + even * s[None, :]).to(query.dtype.element_ty))
    _store_entry(kv, norm, slots, cache, token, c, s, kv_stride, capacity, eps, stored, ROPE=ROPE, RANK=RANK)
