"""Dense MLA decode over the latent cache, on queries and new entries that lie in SBUF: the body of two kernels.

A sequence's cache is read once. Its transposes need no query, so they come first: under a kernel's own order they run
while the queries are still on their way. Sums of latents come out as columns, as W_UV contracts them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.columns import BLOCK
from kimi_k2.nki.kernels.exchange import from_other_core

# Added to the score of a slot that is not in use; its exponential is 0 beside any real score.
MASKED = -30000.0
# Tiles a DMA: one run of 8 KiB a partition of BF16 latents.
_TILES_A_DMA = 8
# Bytes a partition for caches and their transposes.
_CACHE_BYTES = 160 * 1024
# Tiles from which on an exponential a head costs less than a subtraction for all.
_MANY_TILES = 32


class Queries(nl.NKIObject):  # type: ignore[misc]
    """Queries and new entries of B sequences, as columns in SBUF.

    Attributes:
        latent: [128, rank / 128, B * heads], absorbed.
        rope: [copies * rope, B * heads], rotated, repeated as `copies_of_keys` says.
        new_latent: [128, rank / 128, B].
        new_row: [1, B, rank], the same on partition 0.
        new_key: [rope, B], rotated.
    """

    def __init__(self, latent: Any, rope: Any, new_latent: Any, new_row: Any, new_key: Any, heads: int) -> None:
        self.latent, self.rope, self.heads = latent, rope, heads
        self.new_latent, self.new_row, self.new_key = new_latent, new_row, new_key

    def complete(self) -> None:
        """Make the new entries, where scores of cached slots come first."""


def copies_of_keys(rope: int) -> int:
    """How many tiles' rotary keys one transpose turns; tile t's lie from partition t % copies * rope on."""
    return BLOCK // rope if rope in (32, 64) else 1


class _Cache(nl.NKIObject):  # type: ignore[misc]
    """One sequence's cache in SBUF: slot p * count + t of this core's share on partition p of tile t."""

    def __init__(self, latents: Any, keys: Any, first: int, count: int, identity: Any) -> None:
        self.rank, self.rope, self.identity = latents.shape[1], keys.shape[1], identity
        self.copies = copies_of_keys(self.rope)
        self.tiles: list[Any] = []
        self.key_groups: list[Any] = []
        for begin in range(0, count, _TILES_A_DMA):
            many = min(_TILES_A_DMA, count - begin)
            latent_tile = nl.ndarray((BLOCK, many, self.rank), dtype=latents.dtype, buffer=nl.sbuf)
            key_tile = nl.ndarray((BLOCK, many, self.rope), dtype=keys.dtype, buffer=nl.sbuf)
            for table, target in ((latents, latent_tile), (keys, key_tile)):
                mine = table[first * BLOCK : (first + count) * BLOCK].reshape((BLOCK, count, table.shape[1]))
                nisa.dma_copy(dst=target, src=mine[:, begin : begin + many])
            self.tiles += [latent_tile[:, tile, :] for tile in range(many)]
            steps = range(0, many, self.copies)
            self.key_groups += [key_tile[:, t : min(t + self.copies, many), :] for t in steps]
        self._turned: dict[int, Any] = {}
        self._turned_keys: dict[int, Any] = {}

    def turn(self, tile: int) -> None:
        """Transpose a tile, and the keys of its group with the group's first tile."""
        group, place = divmod(tile, self.copies)
        if place == 0:
            keys = self.key_groups[group]
            size = keys.shape[1] * self.rope
            in_psum = nl.ndarray((size, BLOCK), dtype=keys.dtype, buffer=nl.psum)
            nisa.nc_matmul(dst=in_psum, stationary=keys, moving=self.identity, is_transpose=True)
            self._turned_keys[group] = nl.ndarray((size, BLOCK), dtype=keys.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=self._turned_keys[group], src=in_psum, engine=nisa.engine.vector)
        chunks = self.rank // BLOCK
        latent = self.tiles[tile]
        in_psum = nl.ndarray((BLOCK, chunks, BLOCK), dtype=latent.dtype, buffer=nl.psum)
        for chunk in range(chunks):
            piece = latent[:, chunk * BLOCK : (chunk + 1) * BLOCK]
            nisa.nc_matmul(dst=in_psum[:, chunk, :], stationary=piece, moving=self.identity, is_transpose=True)
        self._turned[tile] = nl.ndarray((BLOCK, chunks, BLOCK), dtype=latent.dtype, buffer=nl.sbuf)
        # Vector and Scalar Engine both read PSUM: each takes a share, the faster one more.
        engine = nisa.engine.scalar if tile % 5 in (1, 4) else nisa.engine.vector
        nisa.tensor_copy(dst=self._turned[tile], src=in_psum, engine=engine)

    def score(self, tile: int, queries: Queries, columns: slice, out: Any) -> None:
        """Unscaled scores of a tile's slots: out [128, heads] in PSUM."""
        if tile not in self._turned:
            self.turn(tile)
        group, place = divmod(tile, self.copies)
        turned = self._turned.pop(tile)
        for chunk in range(self.rank // BLOCK):
            nisa.nc_matmul(
                dst=out, stationary=turned[:, chunk, :], moving=queries.latent[:, chunk, columns], accumulate=chunk > 0
            )
        rows = slice(place * self.rope, (place + 1) * self.rope)
        nisa.nc_matmul(
            dst=out, stationary=self._turned_keys[group][rows], moving=queries.rope[rows, columns], accumulate=True
        )


class LatentAttention(nl.NKIObject):  # type: ignore[misc]
    """Attention of B sequences, one query each, to caches [B, S, rank] and [B, S, rope] and to their new entries.

    Args:
        latents, keys: in HBM.
        lengths: int32 [B, 1] in HBM, slots in use.
        own: int32 [B, 1] in HBM, 1 where the new entry takes part; None: everywhere.
        first, count: tiles of 128 slots of this core.
        identity: [128, 128] in the cache's dtype.
        exact, ones: identity and ones, float32 [128, 128].
        turns_later: leave the first cache's transposes to `turn`.
    """

    def __init__(
        self, latents: Any, keys: Any, lengths: Any, own: Any, first: int, count: int, identity: Any, exact: Any,
        ones: Any, turns_later: bool = False,
    ) -> None:  # fmt: skip
        self.latents, self.keys, self.lengths, self.own = latents, keys, lengths, own
        self.first, self.count = first, count
        self.identity, self.exact, self.ones = identity, exact, ones
        batch, _, rank = latents.shape
        entry = (rank + keys.shape[2]) * latents.itemsize
        turned = (rank // BLOCK + 1) * BLOCK * latents.itemsize
        self.turns_first = count * (entry + turned) <= _CACHE_BYTES
        self.ahead = 2 * count * (entry + turned) <= _CACHE_BYTES
        self._caches: dict[int, Any] = {}
        self._penalties = [self._penalty(sequence) for sequence in range(batch)]
        self._absent = [self._absence(sequence) for sequence in range(batch)] if own is not None else []
        if batch:
            self._load(0, turns_later)

    def turn(self) -> None:
        """Transpose the first cache."""
        if self.turns_first:
            for tile in range(self.count):
                self._caches[0].turn(tile)

    def _load(self, sequence: int, turns_later: bool = False) -> None:
        if sequence >= self.latents.shape[0] or sequence in self._caches:
            return
        cache = _Cache(self.latents[sequence], self.keys[sequence], self.first, self.count, self.identity)
        if self.turns_first and not turns_later:
            for tile in range(self.count):
                cache.turn(tile)
        self._caches[sequence] = cache

    def attend(self, queries: Queries, softmax_scale: float) -> tuple[Any, Any, Any]:
        """Sums of latents float32 [128, B, rank / 128, heads]; their weights and maxima [128, B, heads] everywhere."""
        chunks = self.latents.shape[2] // BLOCK
        parts, _ = self._parts(queries, softmax_scale)
        if nl.num_programs() > 1:
            _join(parts, from_other_core(parts))
        return parts[:, :, 0:chunks, :], parts[:, :, chunks, :], parts[:, :, chunks + 1, :]

    def attend_apart(
        self, queries: Queries, softmax_scale: float, meanwhile: Callable[[], None] | None = None
    ) -> tuple[Any, Any]:
        """Sums over this core's slots alone, float32 [128, B, rank / 128, heads], and float32 [128, B, heads].

        Times the second, the sums of both cores add up to softmax times latents. The cores exchange maxima and weights
        while the Tensor Engine still sums; `meanwhile` is called before it does.
        """
        chunks = self.latents.shape[2] // BLOCK
        parts, shares = self._parts(queries, softmax_scale, True, meanwhile)
        return parts[:, :, 0:chunks, :], shares

    def attend_alone(self, queries: Queries, softmax_scale: float) -> tuple[Any, Any, Any]:
        """`attend` over this core's slots alone."""
        chunks = self.latents.shape[2] // BLOCK
        parts, _ = self._parts(queries, softmax_scale)
        return parts[:, :, 0:chunks, :], parts[:, :, chunks, :], parts[:, :, chunks + 1, :]

    def _parts(
        self, queries: Queries, softmax_scale: float, apart: bool = False, meanwhile: Callable[[], None] | None = None
    ) -> tuple[Any, Any]:
        """[128, B, rank / 128 + 2, heads] float32: sums of latents, their weight, the maximum; shares if `apart`."""
        batch, _, rank = self.latents.shape
        chunks, heads = rank // BLOCK, queries.heads
        parts = nl.ndarray((BLOCK, batch, chunks + 2, heads), dtype=nl.float32, buffer=nl.sbuf)
        shares = None
        for sequence in range(batch):
            self._load(sequence)
            if self.ahead:
                self._load(sequence + 1)
            cache, part = self._caches.pop(sequence), parts[:, sequence]
            weights = self._weights(self._scores(cache, queries, sequence, softmax_scale), queries.latent.dtype, part)
            if apart and sequence == batch - 1:
                exchanged = _exchanged(parts[:, :, chunks:, :])
                if meanwhile is not None:
                    meanwhile()
                shares = _shares(parts[:, :, chunks:, :], exchanged)
            self._sum(cache, weights, queries, sequence, part)
        return parts, shares

    def _scores(self, cache: Any, queries: Queries, sequence: int, softmax_scale: float) -> Any:
        """Scaled and masked [128, count + 1, heads] float32; the last column has the new entry on partition 0."""
        heads, count = queries.heads, self.count
        penalty = self._penalties[sequence]
        columns = slice(sequence * heads, (sequence + 1) * heads)
        scores = nl.ndarray((BLOCK, count + 1, heads), dtype=nl.float32, buffer=nl.sbuf)
        a_bank = nl.tile_size.psum_bank_fmax // heads
        for begin in range(0, count, a_bank):
            many = min(a_bank, count - begin)
            bank = nl.ndarray((BLOCK, many, heads), dtype=nl.float32, buffer=nl.psum)
            for tile in range(many):
                cache.score(begin + tile, queries, columns, bank[:, tile, :])
            nisa.scalar_tensor_tensor(
                dst=scores[:, begin : begin + many, :],
                data=bank,
                op0=nl.multiply,
                operand0=softmax_scale,
                op1=nl.add,
                operand1=penalty[:, begin : begin + many].expand_dim(2).broadcast(2, heads),
            )
        queries.complete()
        self._score_new(queries, columns, sequence, scores[:, count, :], softmax_scale)
        return scores

    def _penalty(self, sequence: int) -> Any:
        """[128, count]: 0 in slots below the length, MASKED from it on."""
        slots = nl.ndarray((BLOCK, self.count), dtype=nl.float32, buffer=nl.sbuf)
        nisa.iota(dst=slots, pattern=[[1, self.count]], offset=self.first * BLOCK, channel_multiplier=self.count)
        limit = nl.ndarray((BLOCK, 1), dtype=nl.float32, buffer=nl.sbuf)
        everywhere = self.lengths[sequence].ap(pattern=[[0, BLOCK], [1, 1]])
        nisa.dma_copy(dst=limit, src=everywhere, engine=nisa.engine.sync)
        penalty = nl.ndarray((BLOCK, self.count), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=penalty, data=slots, op0=nl.greater_equal, operand0=limit, op1=nl.multiply, operand1=MASKED
        )
        return penalty

    def _score_new(self, queries: Queries, columns: slice, sequence: int, out: Any, softmax_scale: float) -> None:
        """The new entry's score on partition 0 of core 0; MASKED elsewhere."""
        nisa.memset(dst=out, value=MASKED)
        if nl.program_id() > 0:
            return
        one, rope = slice(sequence, sequence + 1), queries.new_key.shape[0]
        score = nl.ndarray((1, queries.heads), dtype=nl.float32, buffer=nl.psum)
        for chunk in range(queries.latent.shape[1]):
            nisa.nc_matmul(
                dst=score,
                stationary=queries.new_latent[:, chunk, one],
                moving=queries.latent[:, chunk, columns],
                accumulate=chunk > 0,
            )
        nisa.nc_matmul(
            dst=score, stationary=queries.new_key[:, one], moving=queries.rope[0:rope, columns], accumulate=True
        )
        if self.own is None:
            nisa.tensor_scalar(dst=out[0:1], data=score, op0=nl.multiply, operand0=softmax_scale)
            return
        absent = self._absent[sequence]
        nisa.tensor_scalar(
            dst=out[0:1], data=score, op0=nl.multiply, operand0=softmax_scale, op1=nl.add, operand1=absent
        )

    def _absence(self, sequence: int) -> Any:
        """[1, 1]: 0 where the new entry takes part, MASKED where it does not."""
        absent = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=absent, src=self.own[sequence : sequence + 1], engine=nisa.engine.sync)
        nisa.tensor_scalar(dst=absent, data=absent, op0=nl.multiply, operand0=-MASKED, op1=nl.add, operand1=MASKED)
        return absent

    def _weights(self, scores: Any, dtype: Any, part: Any) -> Any:
        """Exponentials [128, count + 1, heads] of `dtype`; their sum and the maximum into part's last two."""
        heads, last, count = scores.shape[2], part.shape[1] - 1, self.count
        top = self._maximum(scores)
        weights = nl.ndarray((BLOCK, count + 1, heads), dtype=dtype, buffer=nl.sbuf)
        if heads == 1 or count >= _MANY_TILES:
            # The Scalar Engine subtracts a head's maximum itself.
            negative = nl.ndarray((BLOCK, heads), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_scalar(dst=negative, data=top, op0=nl.multiply, operand0=-1.0)
            for head in range(heads):
                bias = negative[:, head : head + 1]
                nisa.activation(dst=weights[:, :, head], op=nl.exp, data=scores[:, :, head], bias=bias)
        else:
            shifted = nl.ndarray((BLOCK, count + 1, heads), dtype=nl.float32, buffer=nl.sbuf)
            tops = top.expand_dim(1).broadcast(1, count + 1)
            nisa.tensor_tensor(dst=shifted, data1=scores, data2=tops, op=nl.subtract)
            nisa.activation(dst=weights, op=nl.exp, data=shifted)
        # The weight of what is summed: of the rounded exponentials.
        by_partition = nl.ndarray((BLOCK, heads), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=by_partition, op=nl.add, data=weights.permute((0, 2, 1)), axis=2)
        total = nl.ndarray((BLOCK, heads), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=total, stationary=self.ones, moving=by_partition, accumulate=False)
        nisa.tensor_copy(dst=part[:, last - 1, :], src=total)
        nisa.tensor_copy(dst=part[:, last, :], src=top)
        return weights

    def _sum(self, cache: Any, weights: Any, queries: Queries, sequence: int, part: Any) -> None:
        """Sums of latents over this core into part [128, rank / 128 + 2, heads]."""
        heads, chunks, count = queries.heads, part.shape[1] - 2, self.count
        sums = nl.ndarray((BLOCK, chunks, heads), dtype=nl.float32, buffer=nl.psum)
        for tile in range(count):
            for chunk in range(chunks):
                nisa.nc_matmul(
                    dst=sums[:, chunk, :],
                    stationary=cache.tiles[tile][:, chunk * BLOCK : (chunk + 1) * BLOCK],
                    moving=weights[:, tile, :],
                    accumulate=tile > 0,
                )
        if nl.program_id() == 0:
            for chunk in range(chunks):
                nisa.nc_matmul(
                    dst=sums[:, chunk, :],
                    stationary=queries.new_row[:, sequence, chunk * BLOCK : (chunk + 1) * BLOCK],
                    moving=weights[0:1, count, :],
                    accumulate=True,
                )
        nisa.tensor_copy(dst=part[:, 0:chunks, :], src=sums)

    def _maximum(self, scores: Any) -> Any:
        """The largest score of each head on every partition: [128, heads] in PSUM; exact."""
        heads = scores.shape[2]
        by_partition = nl.ndarray((BLOCK, heads), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=by_partition, op=nl.maximum, data=scores.permute((0, 2, 1)), axis=2)
        turned = nl.ndarray((heads, BLOCK), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=turned, stationary=by_partition, moving=self.exact, is_transpose=True)
        top = nl.ndarray((heads, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=top, op=nl.maximum, data=turned, axis=1)
        # Ones times the diagonal matrix of the maxima.
        diagonal = nl.ndarray((heads, heads), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=diagonal, data=self.exact[0:heads, 0:heads], op0=nl.multiply, operand0=top)
        spread = nl.ndarray((BLOCK, heads), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(dst=spread, stationary=self.ones[0:heads, :], moving=diagonal, accumulate=False)
        return spread


def _exchanged(mine: Any) -> Any:
    """The other core's [128, B, weight | maximum, heads]; None at LNC=1."""
    return from_other_core(mine) if nl.num_programs() > 1 else None


def _shares(mine: Any, theirs: Any) -> Any:
    """exp(this core's maximum - that of both) / the weight of both, from [128, B, weight | maximum, heads]."""
    rows, batch, _, heads = mine.shape
    shares = nl.ndarray((rows, batch, heads), dtype=nl.float32, buffer=nl.sbuf)
    if theirs is None:
        nisa.reciprocal(dst=shares, data=mine[:, :, 0, :])
        return shares
    top = nl.ndarray((rows, batch, heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=top, data1=mine[:, :, 1, :], data2=theirs[:, :, 1, :], op=nl.maximum)
    weight = nl.ndarray((rows, batch, heads), dtype=nl.float32, buffer=nl.sbuf)
    other = nl.ndarray((rows, batch, heads), dtype=nl.float32, buffer=nl.sbuf)
    for part, factor in ((mine, shares), (theirs, other)):
        nisa.tensor_tensor(dst=factor, data1=part[:, :, 1, :], data2=top, op=nl.subtract)
        nisa.activation(dst=factor, op=nl.exp, data=factor)
    nisa.tensor_tensor(dst=weight, data1=mine[:, :, 0, :], data2=shares, op=nl.multiply)
    nisa.tensor_tensor(dst=other, data1=theirs[:, :, 0, :], data2=other, op=nl.multiply)
    nisa.tensor_tensor(dst=weight, data1=weight, data2=other, op=nl.add)
    nisa.reciprocal(dst=weight, data=weight)
    nisa.tensor_tensor(dst=shares, data1=shares, data2=weight, op=nl.multiply)
    return shares


def _join(mine: Any, theirs: Any) -> None:
    """Both cores' [128, B, sums | weight | maximum, heads], into the first, under the common maximum."""
    rows, batch, last, heads = mine.shape
    top = nl.ndarray((rows, batch, heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=top, data1=mine[:, :, last - 1, :], data2=theirs[:, :, last - 1, :], op=nl.maximum)
    for part in (mine, theirs):
        factor = nl.ndarray((rows, batch, heads), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=factor, data1=part[:, :, last - 1, :], data2=top, op=nl.subtract)
        nisa.activation(dst=factor, op=nl.exp, data=factor)
        sums = part[:, :, 0 : last - 1, :]
        nisa.tensor_tensor(dst=sums, data1=sums, data2=factor.expand_dim(2).broadcast(2, last - 1), op=nl.multiply)
    kept = mine[:, :, 0 : last - 1, :]
    nisa.tensor_tensor(dst=kept, data1=kept, data2=theirs[:, :, 0 : last - 1, :], op=nl.add)
    nisa.tensor_copy(dst=mine[:, :, last - 1, :], src=top)


def normalized(sums: Any, total: Any, dtype: Any) -> Any:
    """Sums over their weights, as columns [128, rank / 128, B * heads] of `dtype`."""
    rows, batch, chunks, heads = sums.shape
    divisor = nl.ndarray((rows, batch, heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=divisor, data=total)
    result = nl.ndarray((rows, chunks, batch, heads), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(
        dst=result.permute((0, 2, 1, 3)), data1=sums, data2=divisor.expand_dim(2).broadcast(2, chunks), op=nl.multiply
    )
    return result.reshape((rows, chunks, batch * heads))
