"""Dense MLA decode attention over the paged latent cache in NKI: `kimi_k2.ops.mla.mla_decode`, new token included."""

from __future__ import annotations

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.columns import BLOCK, all_ones, turn_columns, turn_rows
from kimi_k2.nki.kernels.exchange import add_over_cores, share_of
from kimi_k2.nki.kernels.latent_attention import LatentAttention
from kimi_k2.nki.kernels.latent_cache import Pages, Queries, copies_of_keys, rows_of_keys
from kimi_k2.nki.kernels.projections import turn_short_rows
from kimi_k2.nki.kernels.views import spread


@nki.jit
def mla_decode_pages(
    query: Any,
    former: Any,
    latter: Any,
    rows: Any,
    new_latents: Any,
    new_keys: Any,
    lengths: Any,
    softmax_scale: float,
) -> Any:
    """Attention of one query a sequence over its pages and its own new entry.

    Pages are read once, where they lie; scores and softmax are float32. At LNC=2 each core takes half of the slots, and
    the halves are joined by their maxima.

    Args:
        query: [B, heads, rank + rope], absorbed and rotated; at most 128 heads.
        former, latter: [R, (rank + rope) / 2], the halves of all slots' entries; at least half is latent.
        rows: int32 [B, S], where a sequence's slots lie, S a multiple of 128 (of 256 at LNC=2); of those not in use any
            row of finite values.
        new_latents, new_keys: [B, rank] and [B, rope], the entry of the token itself, not in the pages yet; rank of
            128, at most 512, rope at most 128.
        lengths: int32 [B, 1], slots in use; 0 is allowed.
        softmax_scale: of the configuration.

    Returns:
        [B, heads, rank] float32, softmax times latents.
    """
    batch, heads, _ = query.shape
    rank, rope = new_latents.shape[1], new_keys.shape[1]
    pages = Pages(former, latter, rows, rank, rope)
    identity = nl.shared_identity_matrix(BLOCK, dtype=query.dtype)
    exact = nl.shared_identity_matrix(BLOCK, dtype=nl.float32)
    first, count = share_of(rows.shape[1] // BLOCK)
    attention = LatentAttention(
        pages.latents, pages.keys, lengths, None, first, count, identity, exact, all_ones(), pages=pages
    )
    queries = _queries(query, new_latents, new_keys, identity, rank, rope)
    sums, shares = attention.attend(queries, softmax_scale, nl.float32)
    chunks, total = rank // BLOCK, batch * heads
    columns = sums.reshape((BLOCK, chunks, total))
    share = spread(shares.result().reshape((BLOCK, total)), chunks)
    nisa.tensor_tensor(dst=columns, data1=columns, data2=share, op=nl.multiply)
    add_over_cores(columns)
    out = nl.ndarray((batch, heads, rank), dtype=nl.float32, buffer=nl.shared_hbm)
    if nl.program_id() == 0:
        by_head = out.reshape((total, rank))
        for begin in range(0, total, BLOCK):
            end = min(begin + BLOCK, total)
            nisa.dma_copy(dst=by_head[begin:end], src=turn_columns(columns[:, :, begin:end], exact))
    return out


def _queries(query: Any, new_latents: Any, new_keys: Any, identity: Any, rank: int, rope: int) -> Queries:
    """Queries and new entries from HBM as columns."""
    batch, heads, size = query.shape
    chunks, copies, count = rank // BLOCK, copies_of_keys(rope), batch * heads
    latent = nl.ndarray((BLOCK, chunks, count), dtype=query.dtype, buffer=nl.sbuf)
    rotated = rows_of_keys(rope, batch, heads, query.dtype)
    turned = nl.ndarray((rope, count), dtype=query.dtype, buffer=nl.sbuf)
    rows = query.reshape((count, size))
    for begin in range(0, count, BLOCK):
        many = min(BLOCK, count - begin)
        loaded = nl.ndarray((many, size), dtype=query.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=loaded, src=rows[begin : begin + many])
        nisa.tensor_copy(dst=latent[:, :, begin : begin + many], src=turn_rows(loaded[:, 0:rank], identity))
        turn_short_rows(loaded[:, rank:size], identity, turned[:, begin : begin + many])
    for copy in range(copies):
        target = rotated[copy * rope : (copy + 1) * rope, copy]
        nisa.tensor_copy(dst=target, src=turned.reshape((rope, batch, heads)))
    new_rows = nl.ndarray((batch, rank), dtype=new_latents.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=new_rows, src=new_latents)
    key_rows = nl.ndarray((batch, rope), dtype=new_keys.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=key_rows, src=new_keys)
    new_key = nl.ndarray((rope, batch), dtype=new_keys.dtype, buffer=nl.sbuf)
    turn_short_rows(key_rows, identity, new_key)
    return Queries(latent, rotated, turn_rows(new_rows, identity), new_key, heads)
