"""New entries into the paged latent cache in NKI: rows go by DMA to where they belong, nothing else is touched."""

from __future__ import annotations

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.columns import BLOCK

# A row that no cache has; entries of padding go there, and are dropped.
NOWHERE = 2**31 - 1


@nki.jit
def write_pages(former: Any, latter: Any, entries: Any, rows: Any) -> Any:
    """Put the halves of entries into the pages, in place; at LNC=2 a core each half.

    Args:
        former, latter: [blocks, 1, block, D] or [blocks, block, 1, D], written.
        entries: [T, 2 D], of their dtype.
        rows: int32 [T, 1], where among all slots each belongs; `NOWHERE` for none.

    Returns:
        former and latter: only what a kernel returns is known to be written.
    """
    tokens, half, core = entries.shape[0], former.shape[3], nl.program_id()
    slots = former.shape[0] * former.shape[1] * former.shape[2]
    for begin in range(0, tokens, BLOCK):
        count = min(BLOCK, tokens - begin)
        numbers = nl.ndarray((count, 1), dtype=rows.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=numbers, src=rows[begin : begin + count])
        if core == 0:
            _put(former.reshape((slots, half)), entries[begin : begin + count, 0:half], numbers)
        if core == nl.num_programs() - 1:
            _put(latter.reshape((slots, half)), entries[begin : begin + count, half : 2 * half], numbers)
    return former, latter


def _put(table: Any, new: Any, numbers: Any) -> None:
    count, half = new.shape
    tile = nl.ndarray((count, half), dtype=new.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=new)
    target = table.ap(pattern=[[half, count], [1, half]], offset=0, vector_offset=numbers, indirect_dim=0)
    nisa.dma_copy(dst=target, src=tile, oob_mode=nisa.oob_mode.skip)
