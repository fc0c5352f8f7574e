"""Routed experts of one decode step in NKI, loaded selectively: block-scaled FP8 (or BF16, float32) weights in tiles.

AWS's `moe_tkg` has scales by row, wants local expert numbers, and reads gate and up in runs of I values (32 to 64 bytes
at the widths of a rank). Here scales are the checkpoint's blocks of 128, experts of other ranks cost no read, and every
partition of a tile is one run.
"""

from __future__ import annotations

from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.exchange import add_over_cores, share_of

_BLOCK = 128
# For one table's tiles, a partition.
_BUFFER_BYTES = 64 * 1024


@nki.jit
def selective_experts(
    hidden: Any,
    gate_up_tiles: Any,
    gate_up_scales: Any,
    down_tiles: Any,
    down_scales: Any,
    expert_index: Any,
    expert_weights: Any,
    first_expert: int,
    num_experts: int,
) -> Any:
    """The sum over a token's 8 experts, of those that this rank holds: [T, H] float32.

    Args:
        hidden: [T, H], H a multiple of 128 (of 256 at LNC=2), BF16 (float32 with float32 weights).
        gate_up_tiles: [E_local, 128, H/128, 2 * I], I one of 32 and 64: value [e, p, c, j] is row j of gate (of up
            from I on) and column c * 128 + p.
        gate_up_scales: float32 [E_local, 2, H/128], of gate and of up by block of columns; the rank's rows lie in one
            block.
        down_tiles: [E_local, I, H], the transposed weight.
        down_scales: float32 [E_local, H/128], by block of rows.
        expert_index: int32 [T, 8], global numbers.
        expert_weights: float32 [T, 8], final.
        first_expert: global number of the rank's first expert.
        num_experts: of all ranks.

    Returns:
        [T, H/128, 128] float32, to be summed over the ranks.
    """
    tokens = hidden.shape[0]
    slots = expert_index.shape[1]
    local, _, blocks, double = gate_up_tiles.shape
    width, skips = double // 2, local < num_experts
    out = nl.ndarray((tokens, blocks, _BLOCK), dtype=nl.float32, buffer=nl.shared_hbm)
    first, count = share_of(blocks)
    mine = slice(first, first + count)
    identity = nl.shared_identity_matrix(_BLOCK, dtype=hidden.dtype)
    exact = nl.shared_identity_matrix(_BLOCK, dtype=nl.float32)
    halves = _halves(width)
    ones = nl.ndarray((1, _BLOCK), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)

    gate_up = _Buffers(gate_up_tiles[:, :, mine, :], slots, skips)
    down = _Buffers(down_tiles.reshape((local, width, blocks, _BLOCK))[:, :, mine, :], slots, skips)
    scales = nl.ndarray((2, slots, count), dtype=nl.float32, buffer=nl.sbuf)
    out_scales = nl.ndarray((1, slots, count), dtype=nl.float32, buffer=nl.sbuf)
    if skips:
        nisa.memset(dst=scales, value=0.0)
        nisa.memset(dst=out_scales, value=0.0)

    for token in range(tokens):
        one = slice(token, token + 1)
        places, weights = _local(expert_index[one], expert_weights[one], first_expert, local)
        for slot in range(slots):
            place = places[:, slot : slot + 1]
            _load(scales[:, slot, :], gate_up_scales[:, :, mine], place, skips)
            _load(out_scales[:, slot, :], down_scales[:, mine].expand_dim(1), place, skips)
        column = _column(hidden[token], identity, blocks, first, count)
        inner = _inner(column, gate_up, places, _spread(scales, halves), width)
        weighted = nl.ndarray((1, slots, count), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(
            dst=weighted, data1=out_scales, data2=weights.expand_dim(2).broadcast(2, count), op=nl.multiply
        )
        total = _down(inner, down, places, _spread(weighted, ones))
        turned = nl.ndarray((count, _BLOCK), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=turned, stationary=total, moving=exact, is_transpose=True)
        result = nl.ndarray((count, _BLOCK), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=result, src=turned)
        nisa.dma_copy(dst=out[token, mine], src=result)
    return out


class _Buffers(nl.NKIObject):  # type: ignore[misc]
    """Tiles in SBUF for rows of a table of weights, used in turn: as many reads are under way as there are tiles.

    A skipped read leaves what is there, which must be a number: the tiles begin as zeros.
    """

    def __init__(self, table: Any, slots: int, skips: bool) -> None:
        self.table, self.skips = table, skips
        tile_bytes = table.free_size // table.shape[1] * table.itemsize
        self.tiles = []
        for number in range(max(1, min(slots, _BUFFER_BYTES // tile_bytes))):
            tile = nl.ndarray(table.shape[1:], dtype=table.dtype, buffer=nl.sbuf)
            if skips:
                # As 32-bit words, by two engines.
                engine = nisa.engine.vector if number % 2 else nisa.engine.gpsimd
                nisa.memset(dst=tile.view(nl.uint32), value=0, engine=engine)
            self.tiles.append(tile)

    def load(self, slot: int, places: Any) -> Any:
        """The tile with the row of a slot's expert."""
        tile = self.tiles[slot % len(self.tiles)]
        _load(tile, self.table, places[:, slot : slot + 1], self.skips)
        return tile


def _halves(width: int) -> Any:
    """[2, 2 * width] float32: row 0 is 1 at the first half, row 1 at the second."""
    ones = nl.ndarray((2, 2 * width), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=ones, value=1.0)
    for offset, holds in ((0, nl.greater_equal), (-width, nl.less)):
        nisa.affine_select(
            dst=ones,
            pattern=[[1, 2 * width]],
            offset=offset,
            channel_multiplier=-width,
            on_true_tile=ones,
            on_false_value=0.0,
            cmp_op=holds,
        )
    return ones


def _local(index: Any, weights: Any, first_expert: int, local: int) -> tuple[Any, Any]:
    """Of one token: local expert numbers int32 [1, 8], `local` where another rank holds it; weights, 0 there."""
    slots = index.shape[1]
    number = nl.ndarray((1, slots), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=number, src=index)
    nisa.tensor_scalar(dst=number, data=number, op0=nl.subtract, operand0=float(first_expert))
    held = nl.ndarray((1, slots), dtype=nl.float32, buffer=nl.sbuf)
    below = nl.ndarray((1, slots), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=held, data=number, op0=nl.greater_equal, operand0=0.0)
    nisa.tensor_scalar(dst=below, data=number, op0=nl.less, operand0=float(local))
    nisa.tensor_tensor(dst=held, data1=held, data2=below, op=nl.multiply)
    # held ? number : local, as (number - local) * held + local
    nisa.scalar_tensor_tensor(
        dst=number, data=number, op0=nl.subtract, operand0=float(local), op1=nl.multiply, operand1=held
    )
    places = nl.ndarray((1, slots), dtype=nl.int32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=places, data=number, op0=nl.add, operand0=float(local))
    kept = nl.ndarray((1, slots), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=kept, src=weights)
    nisa.tensor_tensor(dst=kept, data1=kept, data2=held, op=nl.multiply)
    return places, kept


def _load(tile: Any, table: Any, place: Any, skips: bool) -> None:
    """Row `place` of a table in HBM; with `skips` nothing where it is out of bounds."""
    mode = nisa.oob_mode.skip if skips else nisa.oob_mode.error
    nisa.dma_copy(dst=tile, src=table.select(0, place), oob_mode=mode)


def _column(row: Any, identity: Any, blocks: int, first: int, count: int) -> Any:
    """[128, count, 1] of this core's blocks of a row [H]."""
    rows = nl.ndarray((count, _BLOCK), dtype=row.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=rows, src=row.reshape((blocks, _BLOCK))[first : first + count])
    turned = nl.ndarray((_BLOCK, count), dtype=row.dtype, buffer=nl.psum)
    nisa.nc_matmul(dst=turned, stationary=rows, moving=identity[0:count, 0:count], is_transpose=True)
    column = nl.ndarray((_BLOCK, count, 1), dtype=row.dtype, buffer=nl.sbuf)
    nisa.tensor_copy(dst=column, src=turned)
    return column


def _spread(rows: Any, selector: Any) -> Any:
    """Rows [n, 8, count] to partitions: partition p gets the row whose selector [n, partitions] is 1 there; exact."""
    _, slots, count = rows.shape
    spread = nl.ndarray((selector.shape[1], slots, count), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=spread, stationary=selector, moving=rows, accumulate=False)
    result = nl.ndarray((selector.shape[1], slots, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=spread)
    return result


def _inner(column: Any, gate_up: _Buffers, places: Any, scales: Any, width: int) -> Any:
    """silu(gate) * up of every slot: [I, 8] in the input's dtype; blocks are summed in float32 after their scales."""
    _, slots, count = scales.shape
    products = nl.ndarray((2 * width, slots, count), dtype=nl.float32, buffer=nl.psum)
    for slot in range(slots):
        tile = gate_up.load(slot, places)
        for block in range(count):
            nisa.nc_matmul(
                dst=products[:, slot, block : block + 1],
                stationary=tile[:, block, :],
                moving=column[:, block, :],
                accumulate=False,
            )
    scaled = nl.ndarray((2 * width, slots, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=scaled, data1=products, data2=scales, op=nl.multiply)
    both = nl.ndarray((2 * width, slots), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=both, op=nl.add, data=scaled, axis=2)
    add_over_cores(both)
    gate = nl.ndarray((width, slots), dtype=nl.float32, buffer=nl.sbuf)
    up = nl.ndarray((width, slots), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=gate, op=nl.silu, data=both[0:width])
    nisa.tensor_copy(dst=up, src=both[width : 2 * width])
    inner = nl.ndarray((width, slots), dtype=column.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=inner, data1=gate, data2=up, op=nl.multiply)
    return inner


def _down(inner: Any, down: _Buffers, places: Any, scales: Any) -> Any:
    """The sum over slots of scale * (down . inner): [128, count]."""
    rows, slots, count = scales.shape
    products = nl.ndarray((rows, slots, count), dtype=nl.float32, buffer=nl.psum)
    for slot in range(slots):
        tile = down.load(slot, places)
        for block in range(count):
            nisa.nc_matmul(
                dst=products[:, slot, block : block + 1],
                stationary=tile[:, block, :],
                moving=inner[:, slot : slot + 1],
                accumulate=False,
            )
    scaled = nl.ndarray((rows, slots, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=scaled, data1=products, data2=scales, op=nl.multiply)
    total = nl.ndarray((rows, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total, op=nl.add, data=scaled.permute((0, 2, 1)), axis=2)
    return total
