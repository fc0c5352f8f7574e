"""Dense MLA decode attention over the latent cache in NKI: `kimi_k2.ops.mla_decode.mla_decode`, new token included."""

from __future__ import annotations

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.exchange import from_other_core, share_of

# Added to the score of a slot that is not in use; its exponential is 0 beside any real score.
_MASKED = -30000.0
_SLOTS = 128  # slots a tile
# Tiles a DMA: one run of 8 KiB a partition of BF16 latents.
_TILES_A_DMA = 8


@nki.jit
def mla_decode(
    query: Any,
    latents: Any,
    keys: Any,
    new_latents: Any,
    new_keys: Any,
    lengths: Any,
    softmax_scale: float,
) -> Any:
    """Attention of one query a sequence over its cache and its own new entry.

    The cache is read once; scores and softmax are float32. At LNC=2 each core takes half of the slots, and the halves
    are joined by their maxima.

    Args:
        query: [B, heads, rank + rope], absorbed and rotated; at most 128 heads.
        latents: [B, S, rank], S a multiple of 128 (of 256 at LNC=2), rank of 128, at most 512.
        keys: [B, S, rope], rotated; rope at most 128.
        new_latents, new_keys: [B, rank] and [B, rope], the entry of the token itself, not in the cache yet.
        lengths: int32 [B, 1], slots in use; 0 is allowed.
        softmax_scale: of the configuration.

    Returns:
        [B, heads, rank] float32, the sums of latents.
    """
    batch, heads, _ = query.shape
    rank, rope = latents.shape[2], keys.shape[2]
    out = nl.ndarray((batch, heads, rank), dtype=nl.float32, buffer=nl.shared_hbm)
    identity = nl.shared_identity_matrix(_SLOTS, dtype=query.dtype)
    exact = nl.shared_identity_matrix(_SLOTS, dtype=nl.float32)
    first, count = share_of(latents.shape[1] // _SLOTS)
    for sequence in range(batch):
        query_t = _transposed(query[sequence], rank, rope, heads)
        scores = nl.ndarray((_SLOTS, count + 1, heads), dtype=nl.float32, buffer=nl.sbuf)
        tiles = _score_cache(query_t, latents[sequence], keys[sequence], identity, scores, first, count)
        own = _score_new(query_t, new_latents[sequence], new_keys[sequence], scores, count)
        _mask(scores, lengths[sequence], first, count, softmax_scale)
        _attend(scores, tiles, own, exact, out[sequence], count, rank)
    return out


def _transposed(rows: Any, rank: int, rope: int, count: int) -> Any:
    """[128, chunks, count] of rows [count, rank + rope]: chunk c holds values c * 128 .. of each row."""
    source = nl.ndarray((count, rank + rope), dtype=rows.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=source, src=rows)
    chunks = rank // _SLOTS + 1
    result = nl.ndarray((_SLOTS, chunks, count), dtype=rows.dtype, buffer=nl.sbuf)
    for chunk in range(chunks):
        size = _SLOTS if chunk < chunks - 1 else rope
        turned = nl.ndarray((size, count), dtype=rows.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=source[:, chunk * _SLOTS : chunk * _SLOTS + size], engine=nisa.engine.tensor)
        nisa.tensor_copy(dst=result[0:size, chunk, :], src=turned)
    return result


def _score_cache(
    query_t: Any, latents: Any, keys: Any, identity: Any, scores: Any, first: int, count: int
) -> list[Any]:
    """Unscaled scores of `count` tiles of slots into scores[:, tile, :]; returns the latents in SBUF, by tile.

    Slot p * count + tile of the core's share lies on partition p, so that a partition is one run of memory.
    """
    rank, rope = latents.shape[1], keys.shape[1]
    heads = scores.shape[2]
    tiles = []
    for begin in range(0, count, _TILES_A_DMA):
        many = min(_TILES_A_DMA, count - begin)
        latent_tile = nl.ndarray((_SLOTS, many, rank), dtype=latents.dtype, buffer=nl.sbuf)
        key_tile = nl.ndarray((_SLOTS, many, rope), dtype=keys.dtype, buffer=nl.sbuf)
        for table, target in ((latents, latent_tile), (keys, key_tile)):
            mine = table[first * _SLOTS : (first + count) * _SLOTS].reshape((_SLOTS, count, table.shape[1]))
            nisa.dma_copy(dst=target, src=mine[:, begin : begin + many])
        for tile in range(many):
            turned = _turned(latent_tile[:, tile, :], key_tile[:, tile, :], identity)
            part = nl.ndarray((_SLOTS, heads), dtype=nl.float32, buffer=nl.psum)
            chunks = rank // _SLOTS + 1
            for chunk in range(chunks):
                size = _SLOTS if chunk < chunks - 1 else rope
                nisa.nc_matmul(
                    dst=part,
                    stationary=turned[0:size, chunk, :],
                    moving=query_t[0:size, chunk, :],
                    accumulate=chunk > 0,
                )
            nisa.tensor_copy(dst=scores[:, begin + tile, :], src=part)
            tiles.append(latent_tile[:, tile, :])
    return tiles


def _turned(latent: Any, key: Any, identity: Any) -> Any:
    """[128, chunks, 128]: the slots of a tile in the free dimension, values in the partitions."""
    rank, rope = latent.shape[1], key.shape[1]
    chunks = rank // _SLOTS
    in_psum = nl.ndarray((_SLOTS, chunks, _SLOTS), dtype=latent.dtype, buffer=nl.psum)
    key_in_psum = nl.ndarray((rope, _SLOTS), dtype=key.dtype, buffer=nl.psum)
    for chunk in range(chunks):
        piece = latent[:, chunk * _SLOTS : (chunk + 1) * _SLOTS]
        nisa.nc_matmul(dst=in_psum[:, chunk, :], stationary=piece, moving=identity, is_transpose=True)
    nisa.nc_matmul(dst=key_in_psum, stationary=key, moving=identity, is_transpose=True)
    turned = nl.ndarray((_SLOTS, chunks + 1, _SLOTS), dtype=latent.dtype, buffer=nl.sbuf)
    # Vector and Scalar Engine both read PSUM: each takes a share.
    nisa.tensor_copy(dst=turned[:, 0:chunks, :], src=in_psum, engine=nisa.engine.vector)
    nisa.tensor_copy(dst=turned[0:rope, chunks, :], src=key_in_psum, engine=nisa.engine.scalar)
    return turned


def _score_new(query_t: Any, latent: Any, key: Any, scores: Any, count: int) -> Any:
    """Unscaled score of the new entry in partition 0 of scores[:, count, :]; returns its latent in SBUF [1, rank].

    Only core 0 lets it take part: elsewhere its column stays masked.
    """
    rank, rope = latent.shape[0], key.shape[0]
    own = nl.ndarray((1, rank), dtype=latent.dtype, buffer=nl.sbuf)
    own_key = nl.ndarray((1, rope), dtype=key.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=own, src=latent.reshape((1, rank)))
    nisa.dma_copy(dst=own_key, src=key.reshape((1, rope)))
    nisa.memset(dst=scores[:, count, :], value=0.0)
    chunks = rank // _SLOTS + 1
    heads = scores.shape[2]
    score = nl.ndarray((1, heads), dtype=nl.float32, buffer=nl.psum)
    column = nl.ndarray((_SLOTS, chunks, 1), dtype=latent.dtype, buffer=nl.sbuf)
    for chunk in range(chunks):
        size = _SLOTS if chunk < chunks - 1 else rope
        piece = own[:, chunk * _SLOTS : (chunk + 1) * _SLOTS] if chunk < chunks - 1 else own_key
        turned = nl.ndarray((size, 1), dtype=latent.dtype, buffer=nl.psum)
        nisa.nc_transpose(dst=turned, data=piece, engine=nisa.engine.tensor)
        nisa.tensor_copy(dst=column[0:size, chunk, :], src=turned)
        nisa.nc_matmul(
            dst=score, stationary=column[0:size, chunk, :], moving=query_t[0:size, chunk, :], accumulate=chunk > 0
        )
    nisa.tensor_copy(dst=scores[0:1, count, :], src=score)
    return own


def _mask(scores: Any, length: Any, first: int, count: int, softmax_scale: float) -> None:
    """Scale, and add _MASKED to slots beyond the length, and to all of the last column but the new entry."""
    heads = scores.shape[2]
    slots = nl.ndarray((_SLOTS, count + 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.iota(dst=slots[:, 0:count], pattern=[[1, count]], offset=first * _SLOTS, channel_multiplier=count)
    limit = nl.ndarray((_SLOTS, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=limit, src=length.ap(pattern=[[0, _SLOTS], [1, 1]]))
    penalty = nl.ndarray((_SLOTS, count + 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=penalty[:, 0:count],
        data=slots[:, 0:count],
        op0=nl.greater_equal,
        operand0=limit,
        op1=nl.multiply,
        operand1=_MASKED,
    )
    nisa.memset(dst=penalty[:, count : count + 1], value=_MASKED)
    if nl.program_id() == 0:
        nisa.memset(dst=penalty[0:1, count : count + 1], value=0.0)
    nisa.scalar_tensor_tensor(
        dst=scores,
        data=scores,
        op0=nl.multiply,
        operand0=softmax_scale,
        op1=nl.add,
        operand1=penalty.expand_dim(2).broadcast(2, heads),
    )


def _attend(scores: Any, tiles: list[Any], own: Any, exact: Any, out: Any, count: int, rank: int) -> None:
    """Softmax over partitions and tiles, the weighted sum of latents, and the other core's part."""
    heads = scores.shape[2]
    top = _maximum(scores, exact)  # [heads, 1]
    spread = nl.ndarray((_SLOTS, heads), dtype=nl.float32, buffer=nl.sbuf)
    _to_all_partitions(top, exact, spread)
    nisa.tensor_tensor(dst=scores, data1=scores, data2=spread.expand_dim(1).broadcast(1, count + 1), op=nl.subtract)
    nisa.activation(dst=scores, op=nl.exp, data=scores)
    weights = nl.ndarray((_SLOTS, count + 1, heads), dtype=own.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=weights, src=scores)
    ones = nl.ndarray((_SLOTS, 1), dtype=own.dtype, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)

    summed = nl.ndarray((heads, rank), dtype=nl.float32, buffer=nl.psum)
    total = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.psum)
    for tile in range(count):
        nisa.nc_matmul(dst=summed, stationary=weights[:, tile, :], moving=tiles[tile], accumulate=tile > 0)
        nisa.nc_matmul(dst=total, stationary=weights[:, tile, :], moving=ones, accumulate=tile > 0)
    nisa.nc_matmul(dst=summed, stationary=weights[0:1, count, :], moving=own, accumulate=True)
    nisa.nc_matmul(dst=total, stationary=weights[0:1, count, :], moving=ones[0:1, :], accumulate=True)

    # The sum, its weight and its maximum side by side: one exchange.
    part = nl.ndarray((heads, rank + 2), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=part[:, 0:rank], src=summed)
    nisa.tensor_copy(dst=part[:, rank : rank + 1], src=total)
    nisa.tensor_copy(dst=part[:, rank + 1 : rank + 2], src=top)
    if nl.num_programs() > 1:
        part = _joined(part, from_other_core(part), rank)
    divisor = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=divisor, data=part[:, rank : rank + 1])
    result = nl.ndarray((heads, rank), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=result, data=part[:, 0:rank], op0=nl.multiply, operand0=divisor)
    if nl.program_id() == 0:
        nisa.dma_copy(dst=out, src=result)


def _maximum(scores: Any, exact: Any) -> Any:
    """The largest score of each head: [heads, 1]."""
    heads = scores.shape[2]
    by_partition = nl.ndarray((_SLOTS, heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=by_partition, op=nl.maximum, data=scores.permute((0, 2, 1)), axis=2)
    turned = nl.ndarray((heads, _SLOTS), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=turned, stationary=by_partition, moving=exact, is_transpose=True)
    top = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=top, op=nl.maximum, data=turned, axis=1)
    return top


def _to_all_partitions(column: Any, exact: Any, out: Any) -> None:
    """[n, 1] to every partition of [128, n]: ones times its diagonal matrix, exact in float32."""
    count = column.shape[0]
    diagonal = nl.ndarray((count, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=diagonal, data=exact[0:count, 0:count], op0=nl.multiply, operand0=column)
    ones = nl.ndarray((count, _SLOTS), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    spread = nl.ndarray((_SLOTS, count), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=spread, stationary=ones, moving=diagonal, accumulate=False)
    nisa.tensor_copy(dst=out, src=spread)


def _joined(mine: Any, theirs: Any, rank: int) -> Any:
    """Both cores' [heads, sum | weight | maximum] under the common maximum."""
    heads = mine.shape[0]
    top = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=top, data1=mine[:, rank + 1 : rank + 2], data2=theirs[:, rank + 1 : rank + 2], op=nl.maximum)
    for part in (mine, theirs):
        factor = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=factor, data1=part[:, rank + 1 : rank + 2], data2=top, op=nl.subtract)
        nisa.activation(dst=factor, op=nl.exp, data=factor)
        nisa.tensor_scalar(dst=part[:, 0 : rank + 1], data=part[:, 0 : rank + 1], op0=nl.multiply, operand0=factor)
    nisa.tensor_tensor(dst=mine[:, 0 : rank + 1], data1=mine[:, 0 : rank + 1], data2=theirs[:, 0 : rank + 1], op=nl.add)
    return mine
