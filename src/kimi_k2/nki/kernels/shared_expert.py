"""The shared expert of one decode step in NKI: this rank's rows of it, for all tokens at once."""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.columns import BLOCK
from kimi_k2.nki.kernels.exchange import add_over_cores
from kimi_k2.nki.kernels.linear import load_weight, project
from kimi_k2.nki.kernels.views import on_partitions


class SharedExpert(nl.NKIObject):  # type: ignore[misc]
    """Weights of this core's blocks, `first` to first + count, in SBUF.

    Args:
        layer: with weights in HBM: `shared_gate_up` [128, H/128, 2 * I], I 32 or 64, its scales float32 [2, H/128] or
            None; `shared_down` [I, H], its scales float32 [H/128] or None.
    """

    row_scales: Any
    out_scales: Any

    def __init__(self, layer: Any, first: int, count: int) -> None:
        gate_up, down = layer.shared_gate_up, layer.shared_down
        width, blocks = down.shape[0], gate_up.shape[1]
        self.width = width
        self.gate_up = load_weight(gate_up[:, first : first + count, :])
        self.down = load_weight(down.reshape((width, blocks, BLOCK))[:, first : first + count, :])
        self.row_scales = None
        self.out_scales = None
        if layer.shared_gate_up_scales != None:
            self.row_scales = nl.ndarray((2 * width, 1, count), dtype=nl.float32, buffer=nl.sbuf)
            for half in range(2):
                rows = self.row_scales[half * width : (half + 1) * width]
                nisa.dma_copy(
                    dst=rows, src=on_partitions(layer.shared_gate_up_scales, width, count, half * blocks + first)
                )
        if layer.shared_down_scales != None:
            self.out_scales = nl.ndarray((BLOCK, count, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.dma_copy(dst=self.out_scales, src=on_partitions(layer.shared_down_scales, BLOCK, count, first))

    def outer(self, activated: Any) -> Any:
        """Down of what `activated` gave, for this core's blocks: float32 [128, count, T]."""
        rows = self.down.reshape((self.width, 1, self.down.shape[1] * BLOCK))
        return project(activated, rows, self.out_scales, nl.float32)

    def activated(self, columns: Any) -> Any:
        """silu(gate . x) * (up . x), [I, 1, T] of the columns' dtype."""
        tokens, width = columns.shape[2], self.width
        both = project(columns, self.gate_up, self.row_scales, nl.float32).reshape((2 * width, tokens))
        add_over_cores(both, pipe_id=1)
        gate = nl.ndarray((width, tokens), dtype=nl.float32, buffer=nl.sbuf)
        up = nl.ndarray((width, tokens), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=gate, op=nl.silu, data=both[0:width])
        nisa.tensor_copy(dst=up, src=both[width : 2 * width])
        inner = nl.ndarray((width, 1, tokens), dtype=columns.dtype, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=inner, data1=gate, data2=up, op=nl.multiply)
        return inner
