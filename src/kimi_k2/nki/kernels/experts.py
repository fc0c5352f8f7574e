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

    Returns:
        [T, H/128, 128] float32, to be summed over the ranks.
    """
    tokens = hidden.shape[0]
    local, _, blocks, double = gate_up_tiles.shape
    width = double // 2
    out = nl.ndarray((tokens, blocks, _BLOCK), dtype=nl.float32, buffer=nl.shared_hbm)
    first, count = share_of(blocks)

    places, weights = _local_places(expert_index, expert_weights, first_expert, local)
    # What a skipped read leaves must be a number; weights of 0 do the rest.
    gate_up = nl.ndarray((_BLOCK, count, double), dtype=gate_up_tiles.dtype, buffer=nl.sbuf)
    down = nl.ndarray((width, count * _BLOCK), dtype=down_tiles.dtype, buffer=nl.sbuf)
    scales = nl.ndarray((double, count), dtype=nl.float32, buffer=nl.sbuf)
    out_scales = nl.ndarray((_BLOCK, count), dtype=nl.float32, buffer=nl.sbuf)
    for tile in (gate_up, down, scales, out_scales):
        nisa.memset(dst=tile, value=0)

    for token in range(tokens):
        column = nl.ndarray((_BLOCK, count, 1), dtype=hidden.dtype, buffer=nl.sbuf)
        row = hidden[token].reshape((blocks, _BLOCK))[first : first + count]
        nisa.dma_copy(dst=column, src=row.permute((1, 0)))
        inner = _inner(column, gate_up_tiles, gate_up_scales, places[token], gate_up, scales, first, count, width)
        total = nl.ndarray((_BLOCK, count), dtype=nl.float32, buffer=nl.sbuf)
        nisa.memset(dst=total, value=0.0)
        factors = _spread(weights, token)
        for slot in range(inner.shape[1]):
            place = places[token][:, slot : slot + 1]
            _load(down, down_tiles[:, :, first * _BLOCK : (first + count) * _BLOCK], place)
            _load(out_scales, down_scales[:, first : first + count].expand_dim(1).broadcast(1, _BLOCK), place)
            _add_down(total, inner[:, slot : slot + 1], down, out_scales, factors[:, slot : slot + 1])
        nisa.dma_copy(dst=out[token, first : first + count].permute((1, 0)), src=total)
    return out


def _local_places(index: Any, weights: Any, first_expert: int, local: int) -> tuple[list[Any], Any]:
    """Local numbers of the chosen experts, `local` (out of bounds) for those of other ranks, and their weights or 0.

    Returns:
        (a [1, 8] int32 tile a token, because an index is read from one partition; weights [T, 8] in HBM).
    """
    tokens, slots = index.shape
    places = []
    kept = nl.ndarray((tokens, slots), dtype=nl.float32, buffer=nl.private_hbm)
    for token in range(tokens):
        number = nl.ndarray((1, slots), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=number, src=index[token : token + 1])
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
        place = nl.ndarray((1, slots), dtype=nl.int32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=place, data=number, op0=nl.add, operand0=float(local))
        places.append(place)
        weight = nl.ndarray((1, slots), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=weight, src=weights[token : token + 1])
        nisa.tensor_tensor(dst=weight, data1=weight, data2=held, op=nl.multiply)
        nisa.dma_copy(dst=kept[token : token + 1], src=weight)
    return places, kept


def _spread(weights: Any, token: int) -> Any:
    """A token's weights on every partition: [128, 8]."""
    slots = weights.shape[1]
    spread = nl.ndarray((_BLOCK, slots), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=spread, src=weights[token : token + 1].ap(pattern=[[0, _BLOCK], [1, slots]]))
    return spread


def _load(tile: Any, table: Any, place: Any) -> None:
    """Row `place` of a table in HBM; nothing where it is out of bounds."""
    nisa.dma_copy(dst=tile, src=table.select(0, place), oob_mode=nisa.oob_mode.skip)


def _inner(
    column: Any,
    tiles: Any,
    scale_table: Any,
    place: Any,
    gate_up: Any,
    scales: Any,
    first: int,
    count: int,
    width: int,
) -> Any:
    """silu(gate) * up of every slot: [I, 8] in the input's dtype; blocks are summed in float32 after their scales."""
    slots = place.shape[1]
    both = nl.ndarray((2 * width, slots), dtype=nl.float32, buffer=nl.sbuf)
    for slot in range(slots):
        one = place[:, slot : slot + 1]
        _load(gate_up, tiles[:, :, first : first + count, :], one)
        for half in range(2):
            rows = scale_table[:, half, first : first + count].expand_dim(1).broadcast(1, width)
            _load(scales[half * width : (half + 1) * width], rows, one)
        blocks = nl.ndarray((2 * width, count), dtype=nl.float32, buffer=nl.psum)
        for block in range(count):
            nisa.nc_matmul(
                dst=blocks[:, block : block + 1],
                stationary=gate_up[:, block, :],
                moving=column[:, block, :],
                accumulate=False,
            )
        scaled = nl.ndarray((2 * width, count), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=scaled, data1=blocks, data2=scales, op=nl.multiply)
        nisa.tensor_reduce(dst=both[:, slot : slot + 1], op=nl.add, data=scaled, axis=1)
    add_over_cores(both)
    gate = nl.ndarray((width, slots), dtype=nl.float32, buffer=nl.sbuf)
    up = nl.ndarray((width, slots), dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=gate, op=nl.silu, data=both[0:width])
    nisa.tensor_copy(dst=up, src=both[width : 2 * width])
    inner = nl.ndarray((width, slots), dtype=column.dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=inner, data1=gate, data2=up, op=nl.multiply)
    return inner


def _add_down(total: Any, inner: Any, down: Any, scales: Any, factor: Any) -> None:
    """Add weight * scale * (down . inner) of one expert to total [128, blocks]."""
    count = total.shape[1]
    part = nl.ndarray((_BLOCK, count), dtype=nl.float32, buffer=nl.psum)
    for block in range(count):
        nisa.nc_matmul(
            dst=part[:, block : block + 1],
            stationary=down[:, block * _BLOCK : (block + 1) * _BLOCK],
            moving=inner,
            accumulate=False,
        )
    scaled = nl.ndarray((_BLOCK, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=scaled, data1=part, data2=scales, op=nl.multiply)
    nisa.scalar_tensor_tensor(dst=total, data=scaled, op0=nl.multiply, operand0=factor, op1=nl.add, operand1=total)
