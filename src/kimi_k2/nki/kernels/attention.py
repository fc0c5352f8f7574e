"""A decode step's attention in one kernel: norms, q_b, absorption, RoPE, attention over the cache, W_UV, o_proj.

Weights lie as tiles, a run of memory a partition; BF16, or FP8 with scales.
"""

from __future__ import annotations

from typing import Any

import nki
import nki.language as nl

from kimi_k2.nki.kernels.columns import BLOCK, all_ones
from kimi_k2.nki.kernels.exchange import share_of
from kimi_k2.nki.kernels.latent_attention import LatentAttention, normalized
from kimi_k2.nki.kernels.projections import OutputProjection, QueryProjection, write_entries


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
    attended: Any = None,
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
        attended: how many of the S slots are read, a multiple of 128 (of 256 at LNC=2); None: all.

    Returns:
        ([B, H/128, 128] float32, to be summed over the ranks; new latents [B, rank]; new rotated keys [B, rope]).
    """
    batch, rank = projected.shape[0], latents.shape[2]
    identity = nl.shared_identity_matrix(BLOCK, dtype=projected.dtype)
    exact = nl.shared_identity_matrix(BLOCK, dtype=nl.float32)
    ones = all_ones()
    # What needs no query comes first: the cache and its transposes, then weights.
    read = latents.shape[1] if attended == None else attended
    first, count = share_of(read // BLOCK)
    attention = LatentAttention(latents, keys, lengths, None, first, count, identity, exact, ones)
    before = QueryProjection(
        q_norm_weight, kv_norm_weight, q_b_tiles, q_b_scales, w_uk_tiles, w_uk_scales, rotation, identity, ones, eps
    )
    behind = OutputProjection(w_uv_tiles, w_uv_scales, o_tiles, o_scales, exact)

    queries = before.queries(projected)
    sums, total, _ = attention.attend(queries, softmax_scale)
    values = behind.values(normalized(sums, total, projected.dtype))
    out = behind.store(values)
    new_latents = nl.ndarray((batch, rank), dtype=projected.dtype, buffer=nl.shared_hbm)
    new_keys = nl.ndarray((batch, keys.shape[2]), dtype=projected.dtype, buffer=nl.shared_hbm)
    write_entries(queries, identity, new_latents, new_keys)
    return out, new_latents, new_keys
