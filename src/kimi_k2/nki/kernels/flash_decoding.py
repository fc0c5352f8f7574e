"""Both ends of a decode step's attention where a group of ranks shares the cache (flash decoding), around `mla_decode`.

`attention_queries`, an all-gather of the queries over the group, `mla_decode` with `own` and `return_logsumexp`, an
all-to-all of its results by heads, `attention_output`.
"""

from __future__ import annotations

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.columns import BLOCK, all_ones, turn_columns
from kimi_k2.nki.kernels.early_router import EarlyRouter
from kimi_k2.nki.kernels.projections import OutputProjection, QueryProjection, store_entries, turn_short_rows


@nki.jit
def attention_queries(
    projected: Any,
    q_norm_weight: Any,
    kv_norm_weight: Any,
    q_b_tiles: Any,
    q_b_scales: Any,
    w_uk_tiles: Any,
    w_uk_scales: Any,
    rotation: Any,
    eps: float,
) -> tuple[Any, Any, Any]:
    """Queries and new entries of B sequences; arguments as those of `attention_decode`, B * heads at most 128.

    Returns:
        (queries [B, heads, rank + rope], absorbed and rotated; new latents [B, rank]; new rotated keys [B, rope]).
    """
    batch, dtype = projected.shape[0], projected.dtype
    identity = nl.shared_identity_matrix(BLOCK, dtype=dtype)
    before = QueryProjection(
        q_norm_weight, kv_norm_weight, q_b_tiles, q_b_scales, w_uk_tiles, w_uk_scales, rotation, identity, all_ones(),
        eps,
    )  # fmt: skip
    heads, rank, rope = before.heads, before.rank, before.rope
    queries = before.queries(projected)
    out = nl.ndarray((batch, heads, rank + rope), dtype=dtype, buffer=nl.shared_hbm)
    if nl.program_id() == 0:
        rows = out.reshape((batch * heads, rank + rope))
        rotated = nl.ndarray((batch * heads, rope), dtype=dtype, buffer=nl.sbuf)
        width = queries.rope.shape[1] * batch * heads
        first = queries.rope.ap(pattern=[[width, rope], [1, batch * heads]])
        turn_short_rows(first, identity, rotated)
        nisa.dma_copy(dst=rows[:, 0:rank], src=turn_columns(queries.latent, identity))
        nisa.dma_copy(dst=rows[:, rank:], src=rotated)
    new_latents, new_keys = store_entries(queries, identity, rank, batch)
    return out, new_latents, new_keys


@nki.jit
def attention_output(
    sums: Any,
    logsumexp: Any,
    w_uv_tiles: Any,
    w_uv_scales: Any,
    o_tiles: Any,
    o_scales: Any,
    dtype: Any,
    residual: Any = None,
    early_residual: Any = None,
    early_heads: Any = None,
) -> Any:
    """Merge the group's parts of this rank's heads, then W_UV and o_proj.

    Args:
        sums: float32 [ranks, B * heads, rank], each rank's softmax times latents; B * heads at most 128.
        logsumexp: float32 [B * heads, ranks].
        w_uv_tiles, w_uv_scales, o_tiles, o_scales: as those of `attention_decode`.
        dtype: of the activations, a name of `nki.language`.
        residual, early_residual, early_heads: the same.

    Returns:
        [B, H/128, 128] float32, to be summed over the ranks; with an early router also float32 [B, E].
    """
    ranks, count, rank = sums.shape
    exact = nl.shared_identity_matrix(BLOCK, dtype=nl.float32)
    behind = OutputProjection(w_uv_tiles, w_uv_scales, o_tiles, o_scales, exact)
    early = None
    if residual != None:
        identity = nl.shared_identity_matrix(BLOCK, dtype=residual.dtype)
        early = EarlyRouter(early_residual, early_heads, residual, identity)
    parts = nl.ndarray((ranks, count, rank), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=parts, src=sums)
    logs = nl.ndarray((count, ranks), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=logs, src=logsumexp)
    rounded = merged_parts(parts, logs, exact, dtype)
    values = behind.values(rounded)
    if early == None:
        return behind.store(values)
    logits = early.store(values)
    return behind.store(values), logits


def merged_parts(parts: Any, logs: Any, exact: Any, dtype: Any) -> Any:
    """Parts of a softmax over slots that lie apart, as columns [128, rank / 128, n] of `dtype`.

    Args:
        parts: float32 [ranks, n, rank] in SBUF, each one's softmax times latents.
        logs: float32 [n, ranks] in SBUF, logs of the sums of exponentials; changed.
        exact: identity, float32 [128, 128].
        dtype: of the result.
    """
    ranks, count, rank = parts.shape
    # A rank a partition: the Tensor Engine weighs and sums them, and leaves columns.
    top = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=top, op=nl.maximum, data=logs, axis=1)
    nisa.tensor_scalar(dst=logs, data=logs, op0=nl.subtract, operand0=top)
    shares = nl.ndarray((count, ranks), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=shares, op=nl.exp, data=logs)
    total = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total, op=nl.add, data=shares, axis=1)
    nisa.reciprocal(dst=total, data=total)
    nisa.tensor_scalar(dst=shares, data=shares, op0=nl.multiply, operand0=total)
    by_rank = nl.ndarray((ranks, count), dtype=nl.float32, buffer=nl.sbuf)
    turn_short_rows(shares, exact, by_rank)
    chunks = rank // BLOCK
    columns = nl.ndarray((BLOCK, chunks, count), dtype=nl.float32, buffer=nl.psum)
    for row in range(count):
        for chunk in range(chunks):
            nisa.nc_matmul(
                dst=columns[:, chunk, row : row + 1],
                stationary=parts[:, row, chunk * BLOCK : (chunk + 1) * BLOCK],
                moving=by_rank[:, row : row + 1],
                accumulate=False,
            )
    rounded = nl.ndarray((BLOCK, chunks, count), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=rounded, src=columns)
    return rounded
