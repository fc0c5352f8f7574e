"""Routed and shared experts of one decode step in NKI: block-scaled FP8 (or BF16, float32) weights in tiles.

AWS's `moe_tkg` has scales by row, wants local expert numbers, and reads gate and up in runs of I values (32 to 64 bytes
at the widths of a rank). Here scales are the checkpoint's blocks of 128, experts of other ranks cost no read, and every
partition of a tile is one run. Experts narrower than the Tensor Engine share its columns and rows.
"""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.columns import BLOCK
from kimi_k2.nki.kernels.exchange import add_over_cores, share_of
from kimi_k2.nki.kernels.views import bytes_of

# For one table's tiles, a partition.
_BUFFER_BYTES = 64 * 1024
# Partitions that a transfer writes, where the kernel has others that wait for it.
_ROWS_A_DMA = 32


class Table(nl.NKIObject):  # type: ignore[misc]
    """A tensor in HBM of whose rows, chosen by numbers known at run time, a part is read.

    Args:
        tensor: a number counts its first dimension.
        sizes, strides: of the part, two or three dimensions.
        offset: where it begins in a row.
    """

    def __init__(self, tensor: Any, sizes: tuple[int, ...], strides: tuple[int, ...], offset: int) -> None:
        self.tensor, self.sizes, self.strides, self.offset = tensor, sizes, strides, offset

    def part(self, row: Any, begin: int, end: int) -> Any:
        """Its first dimension from `begin` to `end`, of row number `row`, which is int32 [1, 1] in SBUF."""
        pattern = [[self.strides[0], end - begin]]
        for dim in range(1, len(self.sizes)):
            pattern.append([self.strides[dim], self.sizes[dim]])
        offset = self.offset + begin * self.strides[0]
        return self.tensor.ap(pattern=pattern, offset=offset, scalar_offset=row, indirect_dim=0)


class RoutedExperts(nl.NKIObject):  # type: ignore[misc]
    """A rank's routed experts, and the tiles in SBUF that they are loaded into.

    `per` experts lie side by side in a stationary tile of gate and up, and `stack` one above the other in one of down:
    expert slot * per + s in columns s * 2I, expert slot * stack + k in rows k * `rows`, this core's rows of I.

    This core's sums are to be added to the other's, which adds up other experts or, where gate and up are divided by
    blocks, other rows of down.

    Args:
        layer: with the weights. `gate_up` [E_local, 128, H/128, 2 * I], I one of 32 and 64: value [e, p, c, j] is row
            j of gate (of up from I on) and column c * 128 + p; its scales float32 [E_local, 2, H/128], of gate and of
            up by block of columns, as the rank's rows lie in one block. `down` [E_local, I, H], the transposed weight;
            its scales float32 [E_local, H/128], by block of rows. `next_experts` [E_local, I, N] without scales, more
            columns of down; None: none.
        num_experts: of all ranks.
        first, count: blocks of H of gate and up that this core multiplies.
        slots: of a token's 8 experts that this core adds up.
    """

    beside_rows: Any
    beside_tiles: Any

    def __init__(self, layer: Any, num_experts: int, first: int, count: int, slots: int) -> None:
        gate_up, down, beside = layer.gate_up, layer.down, layer.next_experts
        local, blocks, double = gate_up.shape[0], gate_up.shape[2], gate_up.shape[3]
        width, size = double // 2, blocks * BLOCK
        self.local = local
        self.extra = 0 if beside == None else beside.shape[2]
        self.num_experts = num_experts
        self.width, self.count, self.slots = width, count, slots
        self.exchanged = count < blocks
        out_count, begin, rows = blocks, 0, width
        if self.exchanged:
            begin, rows = share_of(width)
        self.out_count, self.begin, self.rows = out_count, begin, rows
        self.skips = local < num_experts
        self.per, self.stack = max(1, BLOCK // double), BLOCK // rows
        self.gate_up = Table(gate_up, (BLOCK, count, double), (blocks * double, double, 1), first * double)
        self.down = Table(down, (rows, out_count, BLOCK), (size, BLOCK, 1), begin * size)
        self.gate_up_scales = Table(layer.gate_up_scales, (2, count), (blocks, 1), first)
        self.down_scales = Table(layer.down_scales, (1, out_count), (blocks, 1), 0)
        pairs, groups = slots // self.per, slots // self.stack
        self.gate_up_tiles = self._buffers(pairs, (BLOCK, self.per, count, double), gate_up.dtype)
        self.down_tiles = self._buffers(groups, (BLOCK, out_count, BLOCK), down.dtype)
        self.beside_rows = None
        self.beside_tiles = None
        if beside != None:
            self.beside_rows = Table(beside, (self.rows, self.extra), (self.extra, 1), self.begin * self.extra)
            self.beside_tiles = self._buffers(groups, (BLOCK, self.extra), beside.dtype)
        self.row_scales = nl.ndarray((2 * slots, count), dtype=nl.float32, buffer=nl.sbuf)
        self.out_scales = nl.ndarray((slots, out_count), dtype=nl.float32, buffer=nl.sbuf)
        if self.skips:
            nisa.memset(dst=self.row_scales, value=0.0)
            nisa.memset(dst=self.out_scales, value=0.0)
        # Which row of scales goes to which partition: [2 * slots, pairs, 128] for gate and up, [slots, groups, 128].
        self.spread_rows = _selector(2 * slots, [[-2 * self.per, pairs], [-2, self.per], [-1, 2], [0, width]], pairs)
        self.spread_out = _selector(slots, [[-self.stack, groups], [-1, self.stack], [0, rows]], groups)

    def _buffers(self, wanted: int, shape: tuple[int, ...], dtype: Any) -> list[Any]:
        """Tiles used in turn. A skipped read leaves what is there, which must be a number: they begin as zeros."""
        nbytes = bytes_of(dtype)
        for dim in range(1, len(shape)):
            nbytes = nbytes * shape[dim]
        tiles = []
        for number in range(min(wanted, max(1, _BUFFER_BYTES // nbytes))):
            tile = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
            if self.skips:
                engine = nisa.engine.vector if number % 2 == 1 else nisa.engine.gpsimd
                nisa.memset(dst=tile.view(nl.bfloat16), value=0.0, engine=engine)
            tiles.append(tile)
        return tiles

    def _load(self, tile: Any, table: Table, row: Any) -> None:
        """The part of a table's row `row` in HBM; nothing where another rank holds it."""
        mode = nisa.oob_mode.skip if self.skips else nisa.oob_mode.error
        # Smaller transfers, of as many descriptors, let others pass between them.
        for begin in range(0, tile.shape[0], _ROWS_A_DMA):
            end = min(begin + _ROWS_A_DMA, tile.shape[0])
            nisa.dma_copy(dst=tile[begin:end], src=table.part(row, begin, end), oob_mode=mode)

    def _load_group(self, tile: Any, table: Table, group: int, chosen: list[Any]) -> None:
        """The rows of a group's experts, one above the other."""
        for row in range(self.stack):
            self._load(tile[row * self.rows : (row + 1) * self.rows], table, chosen[group * self.stack + row])

    def sum(self, columns: Any, local_rows: Any, kept: Any, shared: Any, exact: Any) -> Any:
        """[128, n, T] float32: `shared` and each token's experts, of n blocks.

        Args:
            columns: [128, count, T], this core's blocks of the tokens.
            local_rows, kept: of `numbers` and `kept`.
            shared: float32 in SBUF, [128, n, T]; [128, n + ceil(N / 128), T] with N columns `beside`.
            exact: identity, float32 [128, 128].
        """
        tokens = columns.shape[2]
        turned = nl.ndarray((self.slots, tokens), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=turned, stationary=kept, moving=exact[0:tokens, 0:tokens], is_transpose=True)
        by_slot = nl.ndarray((self.slots, tokens), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=by_slot, src=turned)
        result = nl.ndarray(shared.shape, dtype=nl.float32, buffer=nl.sbuf)
        for token in range(tokens):
            chosen = []
            for slot in range(self.slots):
                chosen.append(local_rows[token : token + 1, slot : slot + 1])
            row_scales, factors = self._scales(chosen, by_slot[:, token : token + 1])
            moving = []
            for group in range(self.slots // self.stack):
                inner = self._inner(group, columns[:, :, token : token + 1], chosen, row_scales)
                weighted = nl.ndarray((BLOCK, 1, self.out_count + 1), dtype=columns.dtype, buffer=nl.sbuf)
                nisa.tensor_scalar(dst=weighted[:, 0, :], data=factors[:, group, :], op0=nl.multiply, operand0=inner)
                moving.append(weighted)
            total = self._down(moving, chosen, exact, shared[:, :, token])
            nisa.tensor_copy(dst=result[:, :, token], src=total)
        return result

    def numbers(self, index: Any, first_expert: Any) -> tuple[Any, Any]:
        """Local numbers int32 [T, slots], `local` or more where another rank holds the expert; and where this one does.

        The second is float32, 1 where this rank holds the expert, else 0; None where it holds all.

        Args:
            index: [T, slots] in SBUF, global numbers, integers or float32.
            first_expert: global number of the first local expert: a number, or float32 [T, 1] in SBUF.
        """
        shape, first = index.shape, first_expert
        if isinstance(first_expert, int):
            first = 1.0 * first_expert
        local_rows = nl.ndarray(shape, dtype=nl.int32, buffer=nl.sbuf)
        if not self.skips:
            nisa.tensor_scalar(dst=local_rows, data=index, op0=nl.subtract, operand0=first)
            return local_rows, None
        # What is negative comes behind the last of this rank's.
        behind = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=behind, data=index, op0=nl.less, operand0=first, op1=nl.multiply, operand1=1.0 * self.num_experts
        )
        nisa.scalar_tensor_tensor(
            dst=local_rows, data=index, op0=nl.subtract, operand0=first, op1=nl.add, operand1=behind
        )
        is_local = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=is_local, data=local_rows, op0=nl.less, operand0=1.0 * self.local)
        return local_rows, is_local

    def kept(self, weights: Any, is_local: Any) -> Any:
        """Weights float32 [T, slots] in SBUF, 0 where another rank holds the expert; `is_local` is of `numbers`."""
        if is_local == None:
            return weights
        kept = nl.ndarray(weights.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=kept, data1=weights, data2=is_local, op=nl.multiply)
        return kept

    def _scales(self, chosen: list[Any], weights: Any) -> tuple[Any, Any]:
        """Of a token's experts, on the partitions where they are needed, float32.

        Gate and up's, [128, pairs, count]; down's times the weight, [128, groups, n + 1], the last of them the weight.
        """
        for slot in range(self.slots):
            self._load(self.row_scales[2 * slot : 2 * slot + 2], self.gate_up_scales, chosen[slot])
            self._load(self.out_scales[slot : slot + 1], self.down_scales, chosen[slot])
        count = self.out_count
        weighted = nl.ndarray((self.slots, count + 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=weighted[:, 0:count], data=self.out_scales, op0=nl.multiply, operand0=weights)
        nisa.tensor_copy(dst=weighted[:, count : count + 1], src=weights)
        return _spread(self.row_scales, self.spread_rows), _spread(weighted, self.spread_out)

    def _inner(self, group: int, column: Any, chosen: list[Any], row_scales: Any) -> Any:
        """silu(gate) * up float32 [128, 1] of a group of experts: the k-th on partitions k * `rows` and on.

        Args:
            group: of those that lie in one tile of down.
            column: [128, count, 1], a token's values.
            chosen: of each slot.
            row_scales: of `_scales`.
        """
        per, width, count, rows = self.per, self.width, self.count, self.rows
        pairs = self.stack // per
        both = nl.ndarray((BLOCK, pairs), dtype=nl.float32, buffer=nl.sbuf)
        for pair in range(pairs):
            of_all = group * pairs + pair
            products = nl.ndarray((BLOCK, count, 1), dtype=nl.float32, buffer=nl.psum)
            tile = self.gate_up_tiles[of_all % len(self.gate_up_tiles)]
            for number in range(per):
                self._load(tile[:, number], self.gate_up, chosen[of_all * per + number])
            for block in range(count):
                nisa.nc_matmul(
                    dst=products[:, block, :],
                    stationary=tile[:, :, block, :],
                    moving=column[:, block, :],
                    accumulate=False,
                )
            scaled = nl.ndarray((BLOCK, count), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=scaled, data1=products[:, :, 0], data2=row_scales[:, of_all, :], op=nl.multiply)
            nisa.tensor_reduce(dst=both[:, pair : pair + 1], op=nl.add, data=scaled, axis=1)
        if self.exchanged:
            add_over_cores(both)
        # To the partitions that down's rows lie on.
        gate = nl.ndarray((BLOCK, 1), dtype=nl.float32, buffer=nl.sbuf)
        up = nl.ndarray((BLOCK, 1), dtype=nl.float32, buffer=nl.sbuf)
        for row in range(self.stack):
            pair, source, target = row // per, (row % per) * 2 * width + self.begin, row * rows
            projected = both[source : source + rows, pair : pair + 1]
            nisa.activation(dst=gate[target : target + rows], op=nl.silu, data=projected)
            projected = both[source + width : source + width + rows, pair : pair + 1]
            nisa.tensor_copy(dst=up[target : target + rows], src=projected, engine=nisa.engine.gpsimd)
        nisa.tensor_tensor(dst=gate, data1=gate, data2=up, op=nl.multiply)
        return gate

    def _down(self, inner: list[Any], chosen: list[Any], exact: Any, base: Any) -> Any:
        """The sum over slots of weight * scale * (down . inner): [128, n], then the columns beside.

        Weight and scale multiply the moving operand, before its only rounding, so that experts are summed in PSUM.
        `base`, what the sum begins with, goes through the Tensor Engine, with the identity `exact`, while that waits
        for weights.

        Args:
            inner: of each group of experts [128, 1, n + 1], what goes into down times `_scales`.
            chosen: of each slot.
            exact, base: see above.
        """
        count, groups = self.out_count, len(inner)
        total = nl.ndarray((BLOCK, base.shape[1], 1), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=total[:, :, 0], stationary=exact, moving=base, accumulate=False)
        for group in range(groups):
            moving = inner[group]
            tile = self.down_tiles[group % len(self.down_tiles)]
            self._load_group(tile, self.down, group, chosen)
            for block in range(count):
                value = moving[:, 0, block : block + 1]
                nisa.nc_matmul(dst=total[:, block, :], stationary=tile[:, block, :], moving=value, accumulate=True)
        # Last what has fewest matmuls, which no transfer hides.
        if self.extra > 0:
            for group in range(groups):
                self._add_beside(group, chosen, inner[group][:, 0, count : count + 1], total[:, count:])
        return total[:, :, 0]

    def _add_beside(self, group: int, chosen: list[Any], moving: Any, total: Any) -> None:
        """Add the columns beside down's, of one group of experts."""
        tile = self.beside_tiles[group % len(self.beside_tiles)]
        self._load_group(tile, self.beside_rows, group, chosen)
        for block in range(total.shape[1]):
            size = min(BLOCK, self.extra - block * BLOCK)
            nisa.nc_matmul(
                dst=total[0:size, block, :],
                stationary=tile[:, block * BLOCK : block * BLOCK + size],
                moving=moving,
                accumulate=True,
            )


def _selector(rows: int, pattern: list[list[int]], groups: int) -> Any:
    """float32 [rows, groups, 128]: 1 where the row's number plus the pattern's value is 0."""
    chosen = nl.ndarray((rows, groups * BLOCK), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=chosen, value=1.0)
    nisa.affine_select(
        dst=chosen, pattern=pattern, channel_multiplier=1, on_true_tile=chosen, on_false_value=0.0, cmp_op=nl.equal
    )
    return chosen.reshape((rows, groups, BLOCK))


def _spread(rows: Any, selector: Any) -> Any:
    """Rows [n, count] to partitions, [128, groups, count] in SBUF: the row whose selector is 1 there; exact."""
    groups, count = selector.shape[1], rows.shape[1]
    spread = nl.ndarray((BLOCK, groups, count), dtype=nl.float32, buffer=nl.psum)
    for group in range(groups):
        nisa.nc_matmul(dst=spread[:, group, :], stationary=selector[:, group, :], moving=rows, accumulate=False)
    result = nl.ndarray((BLOCK, groups, count), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=spread)
    return result
