"""The shared expert of one decode step in NKI: this rank's rows of it, for all tokens at once."""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.columns import BLOCK
from kimi_k2.nki.kernels.exchange import add_over_cores
from kimi_k2.nki.kernels.linear import load_weight, project


def shared_expert(columns: Any, gate_up: Any, gate_up_scales: Any, down: Any, down_scales: Any, first: int) -> Any:
    """down . (silu(gate . x) * (up . x)) of this core's blocks: [128, count, T] float32 in SBUF.

    Args:
        columns: [128, count, T], blocks `first` to first + count of the tokens.
        gate_up: in HBM [128, H/128, 2 * I], I 32 or 64.
        gate_up_scales: float32 [2, H/128] in HBM, or None.
        down: in HBM [I, H].
        down_scales: float32 [H/128] in HBM, or None.
    """
    _, count, tokens = columns.shape
    width, blocks = down.shape[0], gate_up.shape[1]
    mine = slice(first, first + count)
    scales = None
    if gate_up_scales is not None:
        scales = nl.ndarray((2 * width, 1, count), dtype=nl.float32, buffer=nl.sbuf)
        for half in range(2):
            row = gate_up_scales[half, mine].reshape((1, count))
            nisa.dma_copy(dst=scales[half * width : (half + 1) * width], src=_repeated(row, width))
    both = project(columns, load_weight(gate_up[:, mine, :]), scales, nl.float32).reshape((2 * width, tokens))
    add_over_cores(both, pipe_id=1)
    gate = nl.ndarray((width, tokens), dtype=nl.float32, buffer=nl.sbuf)
    up = nl.ndarray((width, tokens), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=gate, op=nl.silu, data=both[0:width])
    nisa.tensor_copy(dst=up, src=both[width : 2 * width])
    inner = nl.ndarray((width, 1, tokens), dtype=columns.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=inner, data1=gate, data2=up, op=nl.multiply)

    factors = None
    if down_scales is not None:
        factors = nl.ndarray((BLOCK, count, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=factors, src=_repeated(down_scales[mine].reshape((1, count)), BLOCK))
    tile = load_weight(down.reshape((width, blocks, BLOCK))[:, mine, :]).reshape((width, 1, count * BLOCK))
    return project(inner, tile, factors, nl.float32)


def _repeated(row: Any, times: int) -> Any:
    """A row in HBM [1, n], read once for each of `times` partitions."""
    return row.ap(pattern=[[0, times], [1, row.shape[1]]])
