"""Dense MLA decode attention over the latent cache in NKI: `kimi_k2.ops.mla.mla_decode`, new token included."""

from __future__ import annotations

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.columns import BLOCK, all_ones, turn_columns, turn_rows
from kimi_k2.nki.kernels.exchange import share_of
from kimi_k2.nki.kernels.latent_attention import LatentAttention, normalized
from kimi_k2.nki.kernels.latent_cache import Pages, Queries, copies_of_keys, rows_of_keys
from kimi_k2.nki.kernels.projections import turn_short_rows


@nki.jit
def mla_decode(
    query: Any,
    latents: Any,
    keys: Any,
    new_latents: Any,
    new_keys: Any,
    lengths: Any,
    softmax_scale: float,
    own: Any = None,
    return_logsumexp: bool = False,
    slots: Any = None,
) -> Any:
    """Attention of one query a sequence over its cache and its own new entry.

    The cache is read once; scores and softmax are float32. At LNC=2 each core takes half of the slots, and the halves
    are joined by their maxima. For flash decoding, where a rank has a part of the slots and the queries of its group,
    `own` and `return_logsumexp` give what a merge over the ranks needs.

    Args:
        query: [B, heads, rank + rope], absorbed and rotated; at most 128 heads.
        latents: [B, S, rank], S a multiple of 128 (of 256 at LNC=2), rank of 128, at most 512.
        keys: [B, S, rope], rotated; rope at most 128.
        new_latents, new_keys: [B, rank] and [B, rope], the entry of the token itself, not in the cache yet.
        lengths: int32 [B, 1], slots in use; 0 is allowed.
        softmax_scale: of the configuration.
        own: int32 [B, 1], 1 where the new entry takes part, 0 where another rank counts it; None: everywhere.
        return_logsumexp: return the scores' log of the sum of exponentials too.
        slots: read only so many slots of the cache, in place of S; all that are in use.

    Returns:
        [B, heads, rank] float32, softmax times latents; with return_logsumexp also float32 [B, heads], about -30,000
        where neither a slot nor the new entry takes part.
    """
    batch, heads, _ = query.shape
    read = latents.shape[1] if slots == None else slots
    out, total, top = _attend(query, latents, keys, new_latents, new_keys, lengths, softmax_scale, read, own, None)
    if not return_logsumexp:
        return out
    logsumexp = nl.ndarray((batch, heads), dtype=nl.float32, buffer=nl.shared_hbm)
    if nl.program_id() == 0:
        # Every partition holds all of them.
        result = nl.ndarray((1, batch, heads), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=result, op=nl.log, data=total[0:1])
        nisa.tensor_tensor(dst=result, data1=result, data2=top[0:1], op=nl.add)
        nisa.dma_copy(dst=logsumexp.reshape((1, batch, heads)), src=result)
    return out, logsumexp


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
    """`mla_decode` over pages, which are read where they lie.

    Args:
        query: see there, as the arguments that are not named here.
        former, latter: [R, (rank + rope) / 2], the halves of all slots' entries; at least half is latent.
        rows: int32 [B, S], where a sequence's slots lie; of those not in use any row of finite values.
        new_latents, new_keys: see there.
        lengths: see there.
        softmax_scale: see there.

    Returns:
        [B, heads, rank] float32.
    """
    pages = Pages(former, latter, rows, new_latents.shape[1], new_keys.shape[1])
    out, _, _ = _attend(
        query, pages.latents, pages.keys, new_latents, new_keys, lengths, softmax_scale, rows.shape[1], None, pages
    )
    return out


def _attend(
    query: Any, latents: Any, keys: Any, new_latents: Any, new_keys: Any, lengths: Any, softmax_scale: float,
    read: int, own: Any, pages: Any,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """The result of `read` slots in HBM, and the weights and maxima of `LatentAttention.attend`."""
    batch, heads, _ = query.shape
    rank, rope = latents.shape[2], keys.shape[2]
    identity = nl.shared_identity_matrix(BLOCK, dtype=query.dtype)
    exact = nl.shared_identity_matrix(BLOCK, dtype=nl.float32)
    first, count = share_of(read // BLOCK)
    attention = LatentAttention(latents, keys, lengths, own, first, count, identity, exact, all_ones(), pages=pages)
    queries = _queries(query, new_latents, new_keys, identity, rank, rope)
    sums, total, top = attention.attend(queries, softmax_scale)
    return _rows_of(normalized(sums, total, nl.float32), batch, heads, rank, exact), total, top


def _rows_of(columns: Any, batch: int, heads: int, rank: int, exact: Any) -> Any:
    """[128, rank / 128, B * heads] in SBUF as [B, heads, rank] in HBM."""
    out = nl.ndarray((batch, heads, rank), dtype=nl.float32, buffer=nl.shared_hbm)
    if nl.program_id() == 0:
        rows = out.reshape((batch * heads, rank))
        for begin in range(0, batch * heads, BLOCK):
            end = min(begin + BLOCK, batch * heads)
            nisa.dma_copy(dst=rows[begin:end], src=turn_columns(columns[:, :, begin:end], exact))
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
