"""A decode step's MoE layer in one NKI kernel: norm, noaux_tc router, routed and shared experts.

What the router chooses stays in SBUF. Its weight and the shared expert's need no result of the layer before, nor the
choice, so they can be on their way while a collective runs.
"""

from __future__ import annotations

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.columns import BLOCK, all_ones, load_columns, rms_norm, store_columns, sum_of_squares
from kimi_k2.nki.kernels.early_router import scaled_logits
from kimi_k2.nki.kernels.exchange import add_over_cores, share_of
from kimi_k2.nki.kernels.experts import RoutedExperts
from kimi_k2.nki.kernels.router import choose
from kimi_k2.nki.kernels.shared_expert import SharedExpert

# Weight tiles a DMA: few, so that the first matmul starts early; 5 KiB a partition, enough to fill the engines.
_TILES_A_DMA = 7


@nki.jit
def moe_decode(
    hidden: Any,
    norm_weight: Any,
    router_tiles: Any,
    e_score_correction_bias: Any,
    gate_up_tiles: Any,
    gate_up_scales: Any,
    down_tiles: Any,
    down_scales: Any,
    shared_gate_up_tiles: Any,
    shared_gate_up_scales: Any,
    shared_down_tiles: Any,
    shared_down_scales: Any,
    first_expert: int,
    num_experts: int,
    routed_scaling_factor: float,
    eps: float,
    router_sums: Any = None,
) -> Any:
    """This rank's part of a MoE layer of T tokens.

    Args:
        hidden: [T, H], before the norm; T at most 128, H a multiple of 128 (of 256 at LNC=2).
        norm_weight: [H], of the same dtype.
        router_tiles: [128, H/128, E] of the same dtype: value [p, c, e] is the gate's row e, column c * 128 + p.
            None with an early router.
        e_score_correction_bias: float32 [1, E].
        gate_up_tiles, gate_up_scales, down_tiles, down_scales, first_expert, num_experts: as in `selective_experts`.
        shared_gate_up_tiles, shared_gate_up_scales, shared_down_tiles, shared_down_scales: the same.
        routed_scaling_factor: of the configuration.
        eps: of the norm.
        router_sums: of an early router, float32 [T, E]: logits before the norm's scalar, summed over the ranks.

    Returns:
        [T, H/128, 128] float32, to be summed over the ranks.
    """
    tokens, blocks = hidden.shape[0], gate_up_tiles.shape[2]
    out = nl.ndarray((tokens, blocks, BLOCK), dtype=nl.float32, buffer=nl.shared_hbm)
    first, count = share_of(blocks)
    identity = nl.shared_identity_matrix(BLOCK, dtype=hidden.dtype)
    exact = nl.shared_identity_matrix(BLOCK, dtype=nl.float32)
    router = _load_router(router_tiles, first, count) if router_sums is None else []
    gain = load_columns(norm_weight.reshape((1, blocks * BLOCK)), identity)
    shared_expert = SharedExpert(
        shared_gate_up_tiles, shared_gate_up_scales, shared_down_tiles, shared_down_scales, first, count
    )
    routed = RoutedExperts(gate_up_tiles, gate_up_scales, down_tiles, down_scales, first, count, num_experts)

    # Each core norms all of the row: its sum of squares costs less than an exchange.
    ones, whole = all_ones(), load_columns(hidden, identity)
    squares = sum_of_squares(whole)
    if router_sums is None:
        columns = rms_norm(whole, gain, eps, ones, squares)[:, first : first + count, :]
        logits = _logits(columns, router)
    else:
        logits = scaled_logits(router_sums, squares, blocks * BLOCK, eps, ones)
    index, weights, _ = choose(logits, e_score_correction_bias, routed_scaling_factor, affinities=False)
    number = nl.ndarray(index.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=number, src=index)
    places, kept = routed.places(number, weights, first_expert)
    if router_sums is not None:  # the choice does not wait for the norm
        columns = rms_norm(whole, gain, eps, ones, squares)[:, first : first + count, :]
    # While the chosen experts are on their way.
    shared = shared_expert.apply(columns)
    store_columns(out, routed.sum(columns, places, kept, shared, exact), first, exact)
    return out


def _load_router(tiles: Any, first: int, count: int) -> list[Any]:
    """The router's weight [128, E] of each of this core's blocks, in SBUF."""
    loaded = []
    for begin in range(0, count, _TILES_A_DMA):
        size = min(_TILES_A_DMA, count - begin)
        tile = nl.ndarray((BLOCK, size, tiles.shape[2]), dtype=tiles.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=tiles[:, first + begin : first + begin + size, :])
        loaded += [tile[:, number, :] for number in range(size)]
    return loaded


def _logits(columns: Any, router: list[Any]) -> Any:
    """Normed columns [128, count, T] through the router's weight: float32 [T, E] of both cores' blocks."""
    total = nl.ndarray((columns.shape[2], router[0].shape[1]), dtype=nl.float32, buffer=nl.psum)
    for chunk, weight in enumerate(router):
        nisa.nc_matmul(dst=total, stationary=columns[:, chunk, :], moving=weight, accumulate=chunk > 0)
    logits = nl.ndarray(total.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=logits, src=total)
    add_over_cores(logits)
    return logits
