"""The noaux_tc router in NKI: `kimi_k2.ops.experts.route` for one decode step.

AWS's `router_topk` adds its bias to the logits; here the bias takes part in the choice alone.
"""

from __future__ import annotations

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.exchange import add_over_cores, share_of
from kimi_k2.nki.kernels.views import on_partitions

_NORM_GUARD = 1e-20
# Values that the Vector Engine finds at once.
_FOUND = 8
# Weight tiles a DMA: few, so that the first matmul starts early; 5 KiB a partition, enough to fill the engines.
_TILES_A_DMA = 7


@nki.jit
def noaux_tc_router(
    hidden: Any,
    weight_t: Any,
    e_score_correction_bias: Any,
    routed_scaling_factor: float,
    norm_topk_prob: bool = True,
    top_k: int = 8,
) -> tuple[Any, Any]:
    """Choice and weights of T tokens; at LNC=2 each core reads one half of the weight.

    Args:
        hidden: [T, H], T at most 128, H a multiple of 128 (of 256 at LNC=2), float32 or BF16.
        weight_t: [H, E] of the same dtype, the gate's weight transposed; E at most 512. Row p * H/128 + c goes to
            partition p.
        e_score_correction_bias: float32 [1, E].
        routed_scaling_factor: of the configuration.
        norm_topk_prob: divide the weights by their sum + 1e-20.
        top_k: at most 8.

    Returns:
        (expert_index int32 [T, top_k] by falling biased score, equal ones by the lower index; expert_weights float32
        [T, top_k]).
    """
    tokens, size = hidden.shape
    experts = weight_t.shape[1]
    logits = _logits(hidden, weight_t, tokens, size // nl.tile_size.pmax, experts)
    scores = nl.ndarray((tokens, experts), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=scores, op=nl.sigmoid, data=logits)
    choice = nl.ndarray((tokens, experts), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=choice, src=on_partitions(e_score_correction_bias, tokens, experts))
    nisa.tensor_tensor(dst=choice, data1=choice, data2=scores, op=nl.add)
    index = largest(choice)[:, 0:top_k]
    weights = normalized_weights(scores, index, routed_scaling_factor, norm_topk_prob)
    expert_index = nl.ndarray((tokens, top_k), dtype=nl.int32, buffer=nl.shared_hbm)
    expert_weights = nl.ndarray((tokens, top_k), dtype=nl.float32, buffer=nl.shared_hbm)
    signed = nl.ndarray((tokens, top_k), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=signed, src=index)
    # Both cores hold the results.
    if nl.program_id() == 0:
        nisa.dma_copy(dst=expert_index, src=signed)
        nisa.dma_copy(dst=expert_weights, src=weights)
    return expert_index, expert_weights


def largest(values: Any) -> Any:
    """Numbers of the 8 largest of each row of values [T, E], by falling value, uint32 [T, 8]."""
    best = nl.ndarray((values.shape[0], _FOUND), dtype=nl.float32, buffer=nl.sbuf)
    index = nl.ndarray((values.shape[0], _FOUND), dtype=nl.uint32, buffer=nl.sbuf)
    nisa.max8(dst=best, src=values)
    nisa.nc_find_index8(dst=index, data=values, vals=best)
    return index


def normalized_weights(scores: Any, index: Any, routed_scaling_factor: float, norm_topk_prob: bool = True) -> Any:
    """Weights float32 [T, n] of the experts uint32 [T, n], of scores [T, E]."""
    weights = nl.ndarray(index.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.nc_n_gather(dst=weights, data=scores, indices=index)
    factor = routed_scaling_factor
    if norm_topk_prob:
        total = nl.ndarray((index.shape[0], 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=total, op=nl.add, data=weights, axis=1)
        nisa.tensor_scalar(dst=total, data=total, op0=nl.add, operand0=_NORM_GUARD)
        nisa.reciprocal(dst=total, data=total)
        nisa.tensor_scalar(dst=total, data=total, op0=nl.multiply, operand0=routed_scaling_factor)
        factor = total
    nisa.tensor_scalar(dst=weights, data=weights, op0=nl.multiply, operand0=factor)
    return weights


def _logits(hidden: Any, weight_t: Any, tokens: int, columns: int, experts: int) -> Any:
    """[T, E] float32 in SBUF, of both cores' halves of the contraction."""
    rows = nl.tile_size.pmax
    first, count = share_of(columns)
    hidden_tile = nl.ndarray((rows, tokens, count), dtype=hidden.dtype, buffer=nl.sbuf)
    pattern = [[columns, rows], [rows * columns, tokens], [1, count]]
    nisa.dma_copy(dst=hidden_tile, src=hidden.ap(pattern=pattern, offset=first))
    weight = weight_t.reshape((rows, columns, experts))
    total = nl.ndarray((tokens, experts), dtype=nl.float32, buffer=nl.psum)
    for begin in range(0, count, _TILES_A_DMA):
        tiles = min(_TILES_A_DMA, count - begin)
        weight_tile = nl.ndarray((rows, tiles, experts), dtype=weight_t.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=weight_tile, src=weight[:, first + begin : first + begin + tiles, :])
        for tile in range(tiles):
            column = begin + tile
            nisa.nc_matmul(
                dst=total,
                stationary=hidden_tile[:, :, column],
                moving=weight_tile[:, tile, :],
                accumulate=column > 0,
            )
    logits = nl.ndarray((tokens, experts), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=logits, src=total)
    add_over_cores(logits)
    return logits
