"""The projections on both sides of a decode step's attention, as parts of kernels: weights and their tiles in SBUF.

Their weights are loaded when the parts are made, so that a kernel can have them on their way before its input.
"""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.columns import (
    BLOCK,
    inverse_root,
    load_columns,
    sum_of_squares,
    sum_partitions,
    turn_columns,
)
from kimi_k2.nki.kernels.exchange import share_of
from kimi_k2.nki.kernels.latent_cache import Queries, copies_of_keys, rows_of_keys
from kimi_k2.nki.kernels.linear import load_weight, project
from kimi_k2.nki.kernels.views import stretched, swapped


class QueryProjection(nl.NKIObject):  # type: ignore[misc]
    """Norms, q_b, absorption and RoPE, of weights in HBM: in the model's dtype, or FP8 with float32 scales.

    Args:
        layer: whose `q_norm` [q_rank] and `kv_norm` [rank] are of the model's dtype.
        step: the kernel's `Step`. Its `rotation` is float32 [2, rope, B]: cosines, and sines with the sign that each
            element of a pair takes (minus, plus), of the interleaved layout; its `query_tile`, if any, takes q_b.
        q_b_tiles: [128, q_rank/128, heads * (128 + rope)]; value [p, c, j] is row j of this rank's q_b, column
            c * 128 + p; first the 128 rows without position of each head, then each head's rotary rows.
        q_b_scales: [128, heads + ceil(heads * rope / 128), q_rank/128], rows as those of the tiles; None without.
        w_uk_tiles: [heads, 128, 1, rank]: value [h, n, 0, r] of kv_b's row n of head h.
        w_uk_scales: [heads, 128, rank/128, 1]; value [h, p, c, 0] of column c * 128 + p; None without.

    Attributes:
        heads: of this rank.
    """

    def __init__(
        self, layer: Any, step: Any, q_b_tiles: Any, q_b_scales: Any, w_uk_tiles: Any, w_uk_scales: Any
    ) -> None:
        self.step, self.eps, rotation, identity = step, step.latent_eps, step.rotation, step.identity
        self.heads, self.rank, self.rope = w_uk_tiles.shape[0], w_uk_tiles.shape[3], rotation.shape[1]
        self.q_size = q_b_tiles.shape[1] * BLOCK
        # What the engines turn comes first, so that it does not wait behind the weights.
        self.rotation = nl.ndarray((self.rope, 2, rotation.shape[2]), dtype=nl.float32, buffer=nl.sbuf)
        batch = rotation.shape[2]
        by_row = rotation.ap(pattern=[[batch, self.rope], [self.rope * batch, 2], [1, batch]])
        nisa.dma_copy(dst=self.rotation, src=by_row, engine=nisa.engine.sync)
        self.swap = _pair_swap(identity, self.rope)
        self.q_gain = load_columns(layer.q_norm.reshape((1, self.q_size)), identity)
        self.kv_gain = load_columns(layer.kv_norm.reshape((1, self.rank)), identity)
        self.q_b, self.q_b_rows = load_weight(q_b_tiles, step.query_tile), load_scales(q_b_scales)
        self.w_uk = load_heads(w_uk_tiles, self.heads)
        self.uk_rows = load_heads(w_uk_scales, self.heads)

    def queries(self, sums: Any, hidden: Any, absorb: bool) -> Queries:
        """From down projections that lack their norm's scalar.

        Everything up to the scores is linear, so that no matmul waits for the scalars of the three norms.

        Args:
            sums: float32 [128, (q_rank + rank) / 128 + 1, B] in SBUF: q_a, kv_a's latents and rotary key as columns.
            hidden: float32 [128, H/128, B] in SBUF, what was projected.
            absorb: otherwise `latent` is what W_UK would be given, [128, heads, B].
        """
        chunks, batch = self.q_size // BLOCK, sums.shape[2]
        query = nl.ndarray((BLOCK, chunks, batch), dtype=self.step.dtype, buffer=nl.sbuf)
        gain = stretched(self.q_gain, batch)
        nisa.tensor_tensor(dst=query, data1=sums[:, 0:chunks, :], data2=gain, op=nl.multiply)
        squares = self._squares(sums, hidden)
        nope, unrotated = self._heads(query)
        scale, factors = self._factors(squares, hidden.shape[1] * BLOCK, self.step.eps)
        absorbed = self._absorbed(nope) if absorb else nope
        late = LateEntries(self, sums[:, chunks:, :], scale, factors)
        return Queries(absorbed, self._rotated(unrotated), self.heads, factors, late)

    def entries(self, sums: Any, scale: Any, factors: Any) -> tuple[Any, Any]:
        """New latents as columns [128, rank / 128, B], and rotated keys [rope, B].

        Args:
            sums: float32 [128, rank / 128 + 1, B], kv_a without its norm's scalar.
            scale, factors: of `_factors`.
        """
        chunks, batch, dtype = self.rank // BLOCK, sums.shape[2], self.step.dtype
        unrotated = nl.ndarray((self.rope, batch), dtype=dtype, buffer=nl.sbuf)
        key = sums[0 : self.rope, chunks, :]
        nisa.tensor_tensor(
            dst=unrotated, data1=key, data2=scale[0 : self.rope], op=nl.multiply, engine=nisa.engine.gpsimd
        )
        new_key = nl.ndarray((self.rope, batch), dtype=dtype, buffer=nl.sbuf)
        self._rotate(unrotated, new_key)
        weighted = nl.ndarray((BLOCK, chunks, batch), dtype=nl.float32, buffer=nl.sbuf)
        gain = stretched(self.kv_gain, batch)
        nisa.tensor_tensor(dst=weighted, data1=sums[:, 0:chunks, :], data2=gain, op=nl.multiply)
        latent = nl.ndarray(weighted.shape, dtype=dtype, buffer=nl.sbuf)
        factor = factors.ap(pattern=[[2 * batch, BLOCK], [0, chunks], [1, batch]], offset=batch)
        nisa.tensor_tensor(dst=latent, data1=weighted, data2=factor, op=nl.multiply)
        return latent, new_key

    def _squares(self, sums: Any, hidden: Any) -> Any:
        """Sums of squares of q_a, kv_a's latents and the hidden state on each partition: float32 [128, 3, B]."""
        blocks, latents = self.q_size // BLOCK, self.rank // BLOCK
        squares = nl.ndarray((BLOCK, 3, sums.shape[2]), dtype=nl.float32, buffer=nl.sbuf)
        sum_of_squares(sums[:, 0:blocks, :], squares[:, 0, :])
        sum_of_squares(sums[:, blocks : blocks + latents, :], squares[:, 1, :])
        sum_of_squares(hidden, squares[:, 2, :])
        return squares

    def _factors(self, squares: Any, size: int, eps: float) -> tuple[Any, Any]:
        """The norm's scalar s = rsqrt(mean(h^2) + eps), and s * rsqrt(mean((s * x)^2) + eps) for q_a and kv_a.

        float32 [128, B] and [128, 2, B].

        Args:
            squares: of `_squares`.
            size: of the hidden states.
            eps: of their norm.
        """
        batch = squares.shape[2]
        total = nl.ndarray((BLOCK, 3, batch), dtype=nl.float32, buffer=nl.psum)
        sum_partitions(total, self.step.ones, squares)
        scale = nl.ndarray((BLOCK, batch), dtype=nl.float32, buffer=nl.sbuf)
        inverse_root(scale, total[:, 2, :], size, eps)
        # That is rsqrt(mean(x^2) + eps / s^2), and 1 / s^2 = mean(h^2) + eps.
        guard = nl.ndarray((BLOCK, batch), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=guard, data=total[:, 2, :], op0=nl.multiply, operand0=self.eps / size, op1=nl.add,
            operand1=self.eps * eps,
        )  # fmt: skip
        factors = nl.ndarray((BLOCK, 2, batch), dtype=nl.float32, buffer=nl.sbuf)
        for norm in range(2):
            share = 1.0 / (self.q_size if norm == 0 else self.rank)
            nisa.scalar_tensor_tensor(
                dst=factors[:, norm, :], data=total[:, norm, :], op0=nl.multiply, operand0=share, op1=nl.add,
                operand1=guard,
            )  # fmt: skip
        nisa.activation(dst=factors, op=nl.rsqrt, data=factors)
        return scale, factors

    def _heads(self, query: Any) -> tuple[Any, Any]:
        """q_b of columns [128, q_rank / 128, B]: [128, heads, B] without position, and [rope, heads, B] unrotated."""
        batch, dtype, heads, rope = query.shape[2], query.dtype, self.heads, self.rope
        plain = heads * BLOCK
        rows = self.q_b_rows
        nope = project(query, self.q_b[:, :, 0:plain], rows, dtype)
        unrotated = nl.ndarray((rope, heads, batch), dtype=dtype, buffer=nl.sbuf)
        # Two heads' rotary rows fill the Tensor Engine's columns.
        each = 2 if rows == None and heads % 2 == 0 and 2 * rope == BLOCK else 1
        for head in range(0, heads, each):
            piece = self.q_b[:, :, plain + head * rope : plain + (head + each) * rope]
            if each == 1:
                project(query, piece, self._rotary_scales(head), dtype, out=unrotated[:, head : head + 1, :])
                continue
            both = project(query, piece, None, dtype)
            for number in range(each):
                mine = both[number * rope : (number + 1) * rope, 0, :]
                nisa.tensor_copy(dst=unrotated[:, head + number, :], src=mine)
        return nope, unrotated

    def _absorbed(self, nope: Any) -> Any:
        """W_UK of [128, heads, B]: columns [128, rank / 128, B * heads]."""
        heads, batch, chunks = nope.shape[1], nope.shape[2], self.rank // BLOCK
        absorbed = nl.ndarray((BLOCK, chunks, batch, heads), dtype=nope.dtype, buffer=nl.sbuf)
        for head in range(heads):
            target = absorbed[:, :, :, head]
            project(nope[:, head : head + 1, :], self.w_uk[head], self.uk_rows[head], nope.dtype, out=target)
        return absorbed.reshape((BLOCK, chunks, batch * heads))

    def _rotated(self, unrotated: Any) -> Any:
        """[rope, heads, B] rotated, as `Queries.rope`."""
        rope, heads, batch = unrotated.shape
        dtype = unrotated.dtype
        turned = nl.ndarray((rope, heads, batch), dtype=dtype, buffer=nl.sbuf)
        self._rotate(unrotated.reshape((rope, heads * batch)), turned.reshape((rope, heads * batch)))
        rotated = rows_of_keys(rope, batch, heads, dtype)
        for copy in range(copies_of_keys(rope)):
            engine = nisa.engine.scalar if copy % 2 == 1 else nisa.engine.vector
            target = rotated[copy * rope : (copy + 1) * rope, copy]
            nisa.tensor_copy(dst=target, src=swapped(turned, heads), engine=engine)
        return rotated

    def _rotary_scales(self, head: int) -> Any:
        """Scales of a head's rotary rows, on the partitions where the result lies: [rope, 1, q_rank / 128]."""
        if self.q_b_rows == None:
            return None
        group, row = self.heads + head * self.rope // BLOCK, head * self.rope % BLOCK
        factors = nl.ndarray((self.rope, 1, self.q_size // BLOCK), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=factors, src=self.q_b_rows[row : row + self.rope, group : group + 1, :])
        return factors

    def _rotate(self, columns: Any, out: Any) -> None:
        """Columns [rope, n * B] times cosines, and their pairs swapped times signed sines: out, of their dtype."""
        rope, count = columns.shape
        swap = nl.ndarray((rope, count), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=swap, stationary=self.swap, moving=columns, accumulate=False)
        straight = self._turned(columns, 0)
        crossed = self._turned(swap, 1)
        nisa.tensor_tensor(dst=out, data1=straight, data2=crossed, op=nl.add)

    def _turned(self, values: Any, part: int) -> Any:
        """Values [rope, n * B] times the cosines (part 0) or the signed sines (1), float32."""
        rope, count = values.shape
        batch = self.rotation.shape[2]
        scaled = nl.ndarray((rope, count), dtype=nl.float32, buffer=nl.sbuf)
        pattern = [[2 * batch, rope], [0, count // batch], [1, batch]]
        factors = self.rotation.ap(pattern=pattern, offset=part * batch)
        nisa.tensor_tensor(dst=scaled, data1=values, data2=factors, op=nl.multiply)
        return scaled


class LateEntries(nl.NKIObject):  # type: ignore[misc]
    """New entries that are made when they are asked for; arguments as those of `QueryProjection.entries`."""

    def __init__(self, before: QueryProjection, sums: Any, scale: Any, factors: Any) -> None:
        self.before, self.sums, self.scale, self.factors = before, sums, scale, factors

    def entries(self) -> tuple[Any, Any]:
        """New latents and new keys."""
        return self.before.entries(self.sums, self.scale, self.factors)


class OutputProjection(nl.NKIObject):  # type: ignore[misc]
    """W_UV and this core's rows of o_proj, or all rows, of weights in HBM as those of `QueryProjection`.

    Args:
        layer: whose `w_uv` is [heads, 128, rank/128, 128], value [h, p, c, v] row 128 + v of kv_b's head h, column
            c * 128 + p, with scales [heads, 128, 1, rank/128] or None; and `o_proj` [128, heads, H], value [v, h, j]
            row j of o_proj, column h * 128 + v of this rank's, with scales [128, H/128, heads] or None.
        whole: all of o_proj's rows.
    """

    o_rows: Any

    def __init__(self, layer: Any, whole: bool) -> None:
        self.heads = layer.o_proj.shape[1]
        self.w_uv = load_heads(layer.w_uv, self.heads)
        self.uv_rows = load_heads(layer.w_uv_scales, self.heads)
        first, count = 0, layer.o_proj.shape[2] // BLOCK
        if not whole:
            first, count = share_of(count)
        self.first = first
        self.o_proj = load_weight(layer.o_proj[:, :, first * BLOCK : (first + count) * BLOCK])
        self.o_rows = None
        if layer.o_scales != None:
            self.o_rows = load_weight(layer.o_scales[:, first : first + count])

    def values(self, summed: Any, shares: Any = None) -> Any:
        """o_proj's input from columns [128, rank / 128, B * heads]: [128, heads, B] of their dtype.

        Args:
            summed: the columns.
            shares: float32 [128, B, heads], by which they are still to be multiplied; None: nothing.
        """
        rows, chunks, count = summed.shape
        batch = count // self.heads
        by_head = summed.reshape((rows, chunks, batch, self.heads))
        values = nl.ndarray((BLOCK, self.heads, batch), dtype=summed.dtype, buffer=nl.sbuf)
        for head in range(self.heads):
            weight, target = self.w_uv[head], values[:, head : head + 1, :]
            project(by_head[:, :, :, head], weight, self.uv_rows[head], summed.dtype, shares, target, None, head)
        return values

    def columns(self, values: Any, out: Any, beside: Any, factor: Any = None) -> None:
        """What `values` gave through o_proj, in `out`: float32 [128, n, B] of the n blocks that this core has.

        Multiplied by `factor` [128, B, 1] where it is given, and `beside` of the result's shape added.
        """
        project(values, self.o_proj, self.o_rows, nl.float32, factor, out, beside)


def load_scales(scales: Any) -> Any:
    """A tile of scales, or None."""
    if scales == None:
        return None
    return load_weight(scales)


def load_heads(tensors: Any, heads: int) -> list[Any]:
    """Each head's tile of [heads, ...]; None where there is no tensor."""
    tiles = []
    for head in range(heads):
        tile = None
        if tensors != None:
            tile = load_weight(tensors[head])
        tiles.append(tile)
    return tiles


def turn_short_rows(rows: Any, identity: Any, out: Any) -> None:
    """Rows in SBUF [T, n], n at most 128, as out [n, T]."""
    count, size = rows.shape
    turned = nl.ndarray((size, count), dtype=rows.dtype, buffer=nl.psum)
    nisa.nc_matmul(dst=turned, stationary=rows, moving=identity[0:count, 0:count], is_transpose=True)
    nisa.tensor_copy(dst=out, src=turned)


def write_entries(queries: Queries, identity: Any, new_latents: Any, new_keys: Any) -> None:
    """The new entries into HBM, [B, rank] and [B, rope]; core 0 writes them."""
    if nl.program_id() > 0:
        return
    key_rows = nl.ndarray(new_keys.shape, dtype=new_keys.dtype, buffer=nl.sbuf)
    turn_short_rows(queries.new_key, identity, key_rows)
    nisa.dma_copy(dst=new_latents, src=turn_columns(queries.new_latent, identity))
    nisa.dma_copy(dst=new_keys, src=key_rows)


def _pair_swap(identity: Any, size: int) -> Any:
    """[size, size]: the permutation that swaps the elements of each pair; its own transpose."""
    swap = nl.ndarray((size, size // 2, 2), dtype=identity.dtype, buffer=nl.sbuf)
    for element in range(2):
        other = identity.ap(pattern=[[BLOCK, size], [2, size // 2]], offset=1 - element)
        nisa.tensor_copy(dst=swap[:, :, element], src=other)
    return swap.reshape((size, size))
