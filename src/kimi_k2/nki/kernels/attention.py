"""A decode step's attention beside `mla_decode`: two kernels, with the all-gather of the down projections in between.

`attention_input`: norm, this rank's columns of q_a and kv_a. `attention_decode`: norms, q_b, absorption, RoPE,
attention over the cache, W_UV, o_proj. Weights lie as tiles, a run of memory a partition; BF16, or FP8 with scales.
"""

from __future__ import annotations

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.columns import (
    BLOCK,
    all_ones,
    load_columns,
    rms_norm,
    store_columns,
    turn_columns,
    turn_rows,
)
from kimi_k2.nki.kernels.exchange import share_of
from kimi_k2.nki.kernels.latent_attention import LatentAttention, Queries, copies_of_keys, normalized
from kimi_k2.nki.kernels.linear import load_weight, project
from kimi_k2.nki.kernels.mla_decode import turn_short_rows


@nki.jit
def attention_input(hidden: Any, norm_weight: Any, weight_tiles: Any, weight_scales: Any, eps: float) -> Any:
    """Norm and the down projections of T tokens.

    Args:
        hidden: [T, H], H a multiple of 128.
        norm_weight: [H], of the same dtype.
        weight_tiles: [groups, 128, H/128, N]: value [g, p, c, j] is row g * N + j of the rank's rows of q_a and kv_a,
            column c * 128 + p. With one group core 0 does all of it; with two each core takes one. N at most 128 or a
            multiple of it.
        weight_scales: None, or float32 [groups, min(N, 128), ceil(N/128), H/128], of each row and block of columns.
        eps: of the norm.

    Returns:
        [T, groups * N] in hidden's dtype.
    """
    tokens, groups, width = hidden.shape[0], weight_tiles.shape[0], weight_tiles.shape[3]
    out = nl.ndarray((tokens, groups, width), dtype=hidden.dtype, buffer=nl.shared_hbm)
    for group in range(groups):
        if group % nl.num_programs() != nl.program_id():
            continue
        weight = load_weight(weight_tiles[group])
        scales = None if weight_scales is None else load_weight(weight_scales[group])
        identity = nl.shared_identity_matrix(BLOCK, dtype=hidden.dtype)
        gain = load_columns(norm_weight.reshape((1, hidden.shape[1])), identity)
        columns = rms_norm(load_columns(hidden, identity), gain, eps, all_ones())
        projected = project(columns, weight, scales, hidden.dtype)
        size = projected.shape[0]
        for piece in range(projected.shape[1]):
            rows = nl.ndarray((tokens, size), dtype=hidden.dtype, buffer=nl.sbuf)
            turn_short_rows(projected[:, piece, :], identity, rows)
            nisa.dma_copy(dst=out[:, group, piece * size : (piece + 1) * size], src=rows)
    return out.reshape((tokens, groups * width))


@nki.jit
def attention_decode(
    projected: Any,
    q_norm_weight: Any,
    kv_norm_weight: Any,
    q_b_tiles: Any,
    q_b_scales: Any,
    w_uk_tiles: Any,
    w_uk_scales: Any,
    w_uv_tiles: Any,
    w_uv_scales: Any,
    o_tiles: Any,
    o_scales: Any,
    rotation: Any,
    latents: Any,
    keys: Any,
    lengths: Any,
    softmax_scale: float,
    eps: float,
    slots: Any = None,
) -> tuple[Any, Any, Any]:
    """From the gathered down projections to this rank's part of the attention's output, for B sequences.

    Both cores of LNC=2 make the queries; each attends to half of the slots and has half of o_proj's rows. All scales
    are None for BF16 weights; with FP8 weights float32, [..., rows, row groups, chunks of 128 columns].

    Args:
        projected: [B, q_rank + rank + rope], q_a beside kv_a.
        q_norm_weight, kv_norm_weight: [q_rank] and [rank], of the same dtype.
        q_b_tiles: [128, q_rank/128, heads * (128 + rope)]; value [p, c, j] is row j of this rank's q_b, column
            c * 128 + p; first the 128 rows without position of each head, then each head's rotary rows.
        q_b_scales: [128, heads + ceil(heads * rope / 128), q_rank/128], rows as those of the tiles.
        w_uk_tiles: [heads, 128, 1, rank]: value [h, n, 0, r] of kv_b's row n of head h.
        w_uk_scales: [heads, 128, rank/128, 1]; value [h, p, c, 0] of column c * 128 + p.
        w_uv_tiles: [heads, 128, rank/128, 128]: value [h, p, c, v] is row 128 + v of kv_b's head h, column c * 128 + p.
        w_uv_scales: [heads, 128, 1, rank/128].
        o_tiles: [128, heads, H]: value [v, h, j] is row j of o_proj, column h * 128 + v of this rank's.
        o_scales: [128, H/128, heads].
        rotation: float32 [2, rope, B]: cosines, and sines with the sign that each element of a pair takes (minus,
            plus), of the interleaved layout.
        latents: [B, S, rank], S a multiple of 128 (of 256 at LNC=2).
        keys: [B, S, rope].
        lengths: int32 [B, 1], slots in use, without the new entry.
        softmax_scale: of the configuration.
        eps: of both norms.
        slots: int32 [B, 1], where the new entries are written to the cache; None: they are returned only.

    Returns:
        ([B, H/128, 128] float32, to be summed over the ranks; new latents [B, rank]; new rotated keys [B, rope]).
    """
    batch, dtype = projected.shape[0], projected.dtype
    rank, rope = latents.shape[2], keys.shape[2]
    heads, blocks = o_tiles.shape[1], o_tiles.shape[2] // BLOCK
    out = nl.ndarray((batch, blocks, BLOCK), dtype=nl.float32, buffer=nl.shared_hbm)
    new_latents = nl.ndarray((batch, rank), dtype=dtype, buffer=nl.shared_hbm)
    new_keys = nl.ndarray((batch, rope), dtype=dtype, buffer=nl.shared_hbm)
    identity = nl.shared_identity_matrix(BLOCK, dtype=dtype)
    exact = nl.shared_identity_matrix(BLOCK, dtype=nl.float32)
    ones = all_ones()

    # What needs no query comes first: the cache and its transposes, then weights.
    first, count = share_of(latents.shape[1] // BLOCK)
    attention = LatentAttention(latents, keys, lengths, None, first, count, identity, exact, ones)
    q_b, q_b_rows = load_weight(q_b_tiles), _load_scales(q_b_scales)
    w_uk = [load_weight(w_uk_tiles[head]) for head in range(heads)]
    w_uv = [load_weight(w_uv_tiles[head]) for head in range(heads)]
    uk_rows = [None if w_uk_scales is None else load_weight(w_uk_scales[head]) for head in range(heads)]
    uv_rows = [None if w_uv_scales is None else load_weight(w_uv_scales[head]) for head in range(heads)]
    first_block, many_blocks = share_of(blocks)
    mine = slice(first_block, first_block + many_blocks)
    o_weight = load_weight(o_tiles[:, :, first_block * BLOCK : (first_block + many_blocks) * BLOCK])
    o_rows = None if o_scales is None else load_weight(o_scales[:, mine])
    turned = nl.ndarray((rope, 2, batch), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=turned, src=rotation.permute((1, 0, 2)))
    swap = _pair_swap(identity, rope)
    q_size = q_b_tiles.shape[1] * BLOCK
    gains = [
        load_columns(weight.reshape((1, size)), identity)
        for weight, size in ((q_norm_weight, q_size), (kv_norm_weight, rank))
    ]

    rows = nl.ndarray((batch, q_size + rank + rope), dtype=dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows, src=projected)
    columns = turn_rows(rows[:, 0 : q_size + rank], identity)
    chunks = q_size // BLOCK
    latent = rms_norm(columns[:, chunks:, :], gains[1], eps, ones)
    unrotated = nl.ndarray((rope, batch), dtype=dtype, buffer=nl.sbuf)
    turn_short_rows(rows[:, q_size + rank :], identity, unrotated)
    new_key = nl.ndarray((rope, batch), dtype=dtype, buffer=nl.sbuf)
    _rotate(unrotated, turned, swap, new_key)
    new_rows = turn_columns(latent, identity)

    query = rms_norm(columns[:, 0:chunks, :], gains[0], eps, ones)
    absorbed, rotated = _queries(query, q_b, q_b_rows, w_uk, uk_rows, turned, swap, rank, rope, heads)
    new_row = _on_one_partition(new_rows)
    queries = Queries(absorbed, rotated, latent, new_row, new_key, heads)
    sums, total, _ = attention.attend(queries, softmax_scale)
    summed = normalized(sums, total, dtype).reshape((BLOCK, rank // BLOCK, batch, heads))

    values = nl.ndarray((BLOCK, heads, batch), dtype=dtype, buffer=nl.sbuf)
    for head in range(heads):
        nisa.tensor_copy(dst=values[:, head, :], src=project(summed[:, :, :, head], w_uv[head], uv_rows[head], dtype))
    store_columns(out, project(values, o_weight, o_rows, nl.float32), first_block, exact)

    if nl.program_id() == 0:
        key_rows = nl.ndarray((batch, rope), dtype=dtype, buffer=nl.sbuf)
        turn_short_rows(new_key, identity, key_rows)
        nisa.dma_copy(dst=new_latents, src=new_rows)
        nisa.dma_copy(dst=new_keys, src=key_rows)
    if slots is not None:
        _write(latents, keys, new_rows, new_key, identity, slots)
    return out, new_latents, new_keys


def _load_scales(scales: Any) -> Any:
    return None if scales is None else load_weight(scales)


def _pair_swap(identity: Any, size: int) -> Any:
    """[size, size]: the permutation that swaps the elements of each pair; its own transpose."""
    swap = nl.ndarray((size, size // 2, 2), dtype=identity.dtype, buffer=nl.sbuf)
    pairs = identity[0:size, 0:size].reshape((size, size // 2, 2))
    for element in range(2):
        nisa.tensor_copy(dst=swap[:, :, element], src=pairs[:, :, 1 - element])
    return swap.reshape((size, size))


def _rotate(columns: Any, rotation: Any, swap: Any, out: Any) -> None:
    """Columns [rope, n * B] times cosines, and their pairs swapped times signed sines: out, of their dtype."""
    rope, count = columns.shape
    repeats = count // rotation.shape[2]
    swapped = nl.ndarray((rope, count), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=swapped, stationary=swap, moving=columns, accumulate=False)
    parts = []
    for part, values in enumerate((columns, swapped)):
        scaled = nl.ndarray((rope, count), dtype=nl.float32, buffer=nl.sbuf)
        factors = rotation[:, part, :].expand_dim(1).broadcast(1, repeats)
        nisa.tensor_tensor(dst=scaled, data1=values, data2=factors, op=nl.multiply)
        parts.append(scaled)
    nisa.tensor_tensor(dst=out, data1=parts[0], data2=parts[1], op=nl.add)


def _queries(
    query: Any, q_b: Any, q_b_rows: Any, w_uk: Any, uk_rows: Any, rotation: Any, swap: Any, rank: int, rope: int,
    heads: int,
) -> tuple[Any, Any]:  # fmt: skip
    """Absorbed queries [128, rank / 128, B * heads], and rotated ones [copies * rope, B * heads]."""
    batch, dtype = query.shape[2], query.dtype
    absorbed = nl.ndarray((BLOCK, rank // BLOCK, batch, heads), dtype=dtype, buffer=nl.sbuf)
    plain = heads * BLOCK
    nope = project(query, q_b[:, :, 0:plain], None if q_b_rows is None else q_b_rows[:, 0:heads, :], dtype)
    for head in range(heads):
        nisa.tensor_copy(
            dst=absorbed[:, :, :, head], src=project(nope[:, head : head + 1, :], w_uk[head], uk_rows[head], dtype)
        )
    copies = copies_of_keys(rope)
    rotated = nl.ndarray((copies * rope, batch, heads), dtype=dtype, buffer=nl.sbuf)
    unrotated = nl.ndarray((rope, heads, batch), dtype=dtype, buffer=nl.sbuf)
    for head in range(heads):
        piece = slice(plain + head * rope, plain + (head + 1) * rope)
        group, place = divmod(head * rope, BLOCK)
        factors = None
        if q_b_rows is not None:
            # Rows of the group, on the partitions where the result lies.
            factors = nl.ndarray((rope, 1, q_b.shape[1]), dtype=nl.float32, buffer=nl.sbuf)
            rows = q_b_rows[place : place + rope, heads + group : heads + group + 1, :]
            nisa.tensor_copy(dst=factors, src=rows)
        nisa.tensor_copy(dst=unrotated[:, head, :], src=project(query, q_b[:, :, piece], factors, dtype))
    turned = nl.ndarray((rope, heads, batch), dtype=dtype, buffer=nl.sbuf)
    _rotate(unrotated.reshape((rope, heads * batch)), rotation, swap, turned.reshape((rope, heads * batch)))
    for copy in range(copies):
        nisa.tensor_copy(dst=rotated[copy * rope : (copy + 1) * rope], src=turned.permute((0, 2, 1)))
    count = batch * heads
    return absorbed.reshape((BLOCK, rank // BLOCK, count)), rotated.reshape((copies * rope, count))


def _on_one_partition(rows: Any) -> Any:
    """[B, n] as [1, B, n] on partition 0."""
    batch, size = rows.shape
    if batch == 1:
        return rows.reshape((1, 1, size))
    moved = nl.ndarray((1, batch, size), dtype=rows.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=moved, src=rows)
    return moved


def _write(latents: Any, keys: Any, new_rows: Any, new_key: Any, identity: Any, slots: Any) -> None:
    """Write the new entries to the cache, when both cores have read it."""
    batch, rope = new_rows.shape[0], new_key.shape[0]
    if nl.num_programs() > 1:
        nisa.core_barrier([latents, keys], (0, 1))
    if nl.program_id() > 0:
        return
    key_rows = nl.ndarray((batch, rope), dtype=new_key.dtype, buffer=nl.sbuf)
    turn_short_rows(new_key, identity, key_rows)
    places = nl.ndarray((batch, 1), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=places, src=slots)
    for sequence in range(batch):
        one = slice(sequence, sequence + 1)
        for table, rows in ((latents, new_rows), (keys, key_rows)):
            nisa.dma_copy(dst=table[sequence].select(0, places[one]), src=rows[one])
