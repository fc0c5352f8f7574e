"""Dense MLA decode over the latent cache, on queries and new entries that lie in SBUF: the body of two kernels.

A sequence's cache is read once. Its transposes need no query, so they come first: under a kernel's own order they run
while the queries are still on their way. Sums of latents come out as columns, as W_UV contracts them.
"""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.columns import BANK, BLOCK, all_ones, sum_partitions
from kimi_k2.nki.kernels.exchange import from_other_core
from kimi_k2.nki.kernels.views import bytes_of, on_partitions, over_sums, split, swapped

# Added to the score of a slot that is not in use; its exponential is 0 beside any real score.
MASKED = -30000.0
# Tiles a DMA: one run of 8 KiB a partition of BF16 latents.
_TILES_A_DMA = 8
# Bytes a partition for caches and their transposes.
_CACHE_BYTES = 160 * 1024
# Tiles whose sums come before the weight's, so that the Tensor Engine does not wait for it.
_TILES_BEFORE_WEIGHT = 1
# Of e: times a weight it stays finite in float32, and what it is divided by is lost in it.
LARGEST_POWER = 70.0
# Tiles from which on an exponential a head costs less than a subtraction for all.
_MANY_TILES = 32


class Queries(nl.NKIObject):  # type: ignore[misc]
    """Queries and new entries of B sequences, as columns in SBUF.

    Of several tokens a sequence (`join_tokens`) heads are those of all its tokens, a token's after the other's, and new
    entries lie in the same order, [.., B * tokens].

    Attributes:
        tokens: of each sequence.
        latent: [128, rank / 128, B * heads], absorbed.
        rope: [copies * rope, copies, B, heads], rotated, for `copies_of_keys` tiles: those of tile c lie on its rows,
            from c * rope on, in column c, with zeros in the others.
        heads: of each sequence.
        new_latent: [128, rank / 128, B].
        new_key: [rope, B], rotated.
        factor: float32 [128, B], what scores are still to be multiplied by; None: nothing.
        late: a `LateEntries` that makes the new entries; None: they are there.
    """

    factor: Any
    late: Any
    tokens: int

    def __init__(self, latent: Any, rope: Any, new_latent: Any, new_key: Any, heads: int) -> None:
        self.latent, self.rope, self.heads = latent, rope, heads
        self.new_latent, self.new_key = new_latent, new_key
        self.factor = None
        self.late = None
        self.tokens = 1

    def join_tokens(self, tokens: int) -> None:
        """Make sequences of `tokens` that follow each other, each of which was one until now."""
        rows, copies, count = self.rope.shape[0], self.rope.shape[1], self.rope.shape[2]
        self.tokens, self.heads = tokens, self.heads * tokens
        self.rope = self.rope.reshape((rows, copies, count // tokens, self.heads))

    def complete(self) -> None:
        """Make the new entries, where scores of cached slots come first."""
        if self.late != None and self.new_key == None:
            new_latent, new_key = self.late.entries()
            self.new_latent, self.new_key = new_latent, new_key


def rows_of_keys(rope: int, batch: int, heads: int, dtype: Any) -> Any:
    """A tile for `Queries.rope`, of zeros."""
    copies = copies_of_keys(rope)
    rows = nl.ndarray((copies * rope, copies, batch, heads), dtype=dtype, buffer=nl.sbuf)
    if copies > 1:
        nisa.memset(dst=rows, value=0.0, engine=nisa.engine.gpsimd)
    return rows


def copies_of_keys(rope: int) -> int:
    """How many tiles' rotary keys one transpose turns; tile t's lie from partition t % copies * rope on."""
    return BLOCK // rope if rope == 32 or rope == 64 else 1


class Cache(nl.NKIObject):  # type: ignore[misc]
    """One sequence's cache in SBUF: slot p * count + t of this core's share on partition p of tile t."""

    turned: list[Any]
    turned_keys: list[Any]

    def __init__(
        self, latents: Any, keys: Any, sequence: int, first: int, count: int, identity: Any, pages: Any = None
    ) -> None:
        self.rank, self.rope, self.identity = latents.shape[2], keys.shape[2], identity
        self.copies = copies_of_keys(self.rope)
        self.tiles = []
        self.key_groups = []
        self.turned = []
        self.turned_keys = []
        for begin in range(0, count, _TILES_A_DMA):
            many = min(_TILES_A_DMA, count - begin)
            if pages == None:
                latent_tile = _load_slots(latents, sequence, first, count, begin, many)
                key_tile = _load_slots(keys, sequence, first, count, begin, many)
            else:
                latent_tile, key_tile = pages.load(sequence, first, count, begin, many)
            for tile in range(many):
                self.tiles.append(latent_tile[:, tile, :])
                self.turned.append(None)
            for tile in range(0, many, self.copies):
                self.key_groups.append(key_tile[:, tile : min(tile + self.copies, many), :])
                self.turned_keys.append(None)

    def turn(self, tile: int) -> None:
        """Transpose a tile, and the keys of its group with the group's first tile."""
        group = tile // self.copies
        if tile % self.copies == 0:
            keys = self.key_groups[group]
            size = keys.shape[1] * self.rope
            in_psum = nl.ndarray((size, BLOCK), dtype=keys.dtype, buffer=nl.psum)
            nisa.nc_matmul(dst=in_psum, stationary=keys, moving=self.identity, is_transpose=True)
            self.turned_keys[group] = nl.ndarray((size, BLOCK), dtype=keys.dtype, buffer=nl.sbuf)
            nisa.tensor_copy(dst=self.turned_keys[group], src=in_psum, engine=nisa.engine.vector)
        chunks = self.rank // BLOCK
        latent = self.tiles[tile]
        in_psum = nl.ndarray((BLOCK, chunks, BLOCK), dtype=latent.dtype, buffer=nl.psum)
        for chunk in range(chunks):
            piece = latent[:, chunk * BLOCK : (chunk + 1) * BLOCK]
            nisa.nc_matmul(dst=in_psum[:, chunk, :], stationary=piece, moving=self.identity, is_transpose=True)
        self.turned[tile] = nl.ndarray((BLOCK, chunks, BLOCK), dtype=latent.dtype, buffer=nl.sbuf)
        # Vector and Scalar Engine both read PSUM: each takes a share, the faster one more.
        engine = nisa.engine.scalar if tile % 5 == 1 or tile % 5 == 4 else nisa.engine.vector
        nisa.tensor_copy(dst=self.turned[tile], src=in_psum, engine=engine)

    def score_latents(self, tile: int, queries: Queries, first: int, heads: int, out: Any) -> None:
        """What latents add to a tile's unscaled scores of queries `first` and on: out [128, heads] in PSUM."""
        if self.turned[tile] == None:
            self.turn(tile)
        turned = self.turned[tile]
        for chunk in range(self.rank // BLOCK):
            moving = queries.latent[:, chunk, first : first + heads]
            nisa.nc_matmul(dst=out, stationary=turned[:, chunk, :], moving=moving, accumulate=chunk > 0)

    def score_keys(self, group: int, queries: Queries, sequence: int, out: Any) -> None:
        """What rotary keys add to the scores of a group's tiles: out [128, tiles, heads] in PSUM."""
        keys = self.turned_keys[group]
        moving = queries.rope[0 : keys.shape[0], 0 : out.shape[1], sequence, :]
        nisa.nc_matmul(dst=out, stationary=keys, moving=moving, accumulate=True)


def _load_slots(table: Any, sequence: int, first: int, count: int, begin: int, many: int) -> Any:
    """Tiles `begin` and on of a core's slots, from [B, S, n] in HBM: [128, many, n] in SBUF."""
    width = table.shape[2]
    tile = nl.ndarray((BLOCK, many, width), dtype=table.dtype, buffer=nl.sbuf)
    offset = (sequence * table.shape[1] + first * BLOCK + begin) * width
    source = table.ap(pattern=[[count * width, BLOCK], [width, many], [1, width]], offset=offset)
    nisa.dma_copy(dst=tile, src=source)
    return tile


class Part(nl.NKIObject):  # type: ignore[misc]
    """Shape [B, S, n] and dtype of what lies in pages."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype = shape, dtype


class Pages(nl.NKIObject):  # type: ignore[misc]
    """Caches that lie in pages, in HBM: an entry is a row of `former` and one of `latter`, latents first.

    Attributes:
        latents, keys: `Part` of each.
    """

    def __init__(self, former: Any, latter: Any, rows: Any, rank: int, rope: int) -> None:
        self.former, self.latter, self.rows = former, latter, rows
        batch, slots = rows.shape
        self.latents = Part((batch, slots, rank), former.dtype)
        self.keys = Part((batch, slots, rope), former.dtype)

    def load(self, sequence: int, first: int, count: int, begin: int, many: int) -> tuple[Any, Any]:
        """`_load_slots` of latents and of keys, by the numbers of their rows."""
        place = nl.ndarray((BLOCK, many), dtype=nl.int32, buffer=nl.sbuf)
        offset = sequence * self.rows.shape[1] + first * BLOCK + begin
        nisa.dma_copy(dst=place, src=self.rows.ap(pattern=[[count, BLOCK], [1, many]], offset=offset))
        rank, rope, half = self.latents.shape[2], self.keys.shape[2], self.former.shape[1]
        latent = nl.ndarray((BLOCK, many, rank), dtype=self.former.dtype, buffer=nl.sbuf)
        key = nl.ndarray((BLOCK, many, rope), dtype=self.former.dtype, buffer=nl.sbuf)
        for tile in range(many):
            row = place[:, tile : tile + 1]
            _gather(latent[:, tile, 0:half], self.former, row, 0)
            _gather(latent[:, tile, half:rank], self.latter, row, 0)
            _gather(key[:, tile, :], self.latter, row, rank - half)
        return latent, key


def _gather(out: Any, table: Any, row: Any, column: int) -> None:
    """Columns from `column` on of a row [R, n] in HBM for each partition, to out [128, many]."""
    pattern = [[table.shape[1], BLOCK], [1, out.shape[1]]]
    nisa.dma_copy(dst=out, src=table.ap(pattern=pattern, offset=column, vector_offset=row, indirect_dim=0))


class LatentAttention(nl.NKIObject):  # type: ignore[misc]
    """Attention of B sequences, one token each or several, to caches [B, S, rank] and [B, S, rope] and new entries.

    A token attends to its own new entry and to those of its sequence's tokens before it.

    Args:
        latents, keys: in HBM.
        lengths: int32 [B, 1] in HBM, slots in use.
        own: int32 [B * tokens, 1] in HBM, 1 where the new entry takes part; None: everywhere.
        first, count: tiles of 128 slots of this core.
        identity: [128, 128] in the cache's dtype.
        exact, ones: identity and ones, float32 [128, 128].
        turns_later: leave the first cache's transposes to `turn`.
        pages: `Pages` where caches lie so, whose parts are `latents` and `keys`.
    """

    absent: Any
    caches: list[Any]

    def __init__(
        self, latents: Any, keys: Any, lengths: Any, own: Any, first: int, count: int, identity: Any, exact: Any,
        ones: Any, turns_later: bool = False, pages: Any = None,
    ) -> None:  # fmt: skip
        self.pages = pages
        self.latents, self.keys = latents, keys
        self.first, self.count = first, count
        self.identity, self.exact, self.ones = identity, exact, ones
        self.near_ones = ones if identity.dtype == ones.dtype else all_ones(identity.dtype)
        batch, rank = latents.shape[0], latents.shape[2]
        size = bytes_of(latents.dtype)
        entry = (rank + keys.shape[2]) * size
        turned = (rank // BLOCK + 1) * BLOCK * size
        self.turns_first = count * (entry + turned) <= _CACHE_BYTES
        self.ahead = 2 * count * (entry + turned) <= _CACHE_BYTES
        self.caches = []
        self.penalties = []
        limits = self._numbers(lengths)
        for sequence in range(batch):
            self.caches.append(None)
            self.penalties.append(self._penalty(limits[:, sequence : sequence + 1]))
        self.absent = None
        if own != None:  # 0 where the new entry takes part, MASKED where it does not
            self.absent = self._numbers(own)
            nisa.tensor_scalar(
                dst=self.absent, data=self.absent, op0=nl.multiply, operand0=-MASKED, op1=nl.add, operand1=MASKED
            )
        self._load(0, turns_later)

    def _numbers(self, table: Any) -> Any:
        """A table int32 [B, 1] in HBM as float32 [128, B], on every partition."""
        batch = table.shape[0]
        loaded = nl.ndarray((BLOCK, batch), dtype=nl.int32, buffer=nl.sbuf)
        nisa.dma_copy(dst=loaded, src=on_partitions(table, BLOCK, batch), engine=nisa.engine.sync)
        numbers = nl.ndarray((BLOCK, batch), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_copy(dst=numbers, src=loaded, engine=nisa.engine.gpsimd)
        return numbers

    def turn(self) -> None:
        """Transpose the first cache."""
        if self.turns_first:
            for tile in range(self.count):
                self.caches[0].turn(tile)

    def _load(self, sequence: int, turns_later: bool = False) -> None:
        if sequence >= self.latents.shape[0] or self.caches[sequence] != None:
            return
        cache = Cache(self.latents, self.keys, sequence, self.first, self.count, self.identity, self.pages)
        if self.turns_first and not turns_later:
            for tile in range(self.count):
                cache.turn(tile)
        self.caches[sequence] = cache

    def attend(self, queries: Queries, softmax_scale: float) -> tuple[Any, Any, Any]:
        """Sums of latents float32 [128, B, rank / 128, heads]; their weights and maxima [128, B, heads] everywhere."""
        chunks = self.latents.shape[2] // BLOCK
        parts = self._parts(queries, softmax_scale)
        if nl.num_programs() > 1:
            _join(parts, from_other_core(parts))
        return parts[:, :, 0:chunks, :], parts[:, :, chunks, :], parts[:, :, chunks + 1, :]

    def attend_apart(self, queries: Queries, softmax_scale: float, dtype: Any, early: Any, own: Any) -> tuple[Any, Any]:
        """Sums over this core's slots alone, [128, rank / 128, B, heads] of `dtype`, and float32 [128, B, heads].

        Times the second, the sums of both cores add up to softmax times latents. The cores exchange maxima and weights
        while the Tensor Engine still sums; `early`, the router's `EarlyLogits`, takes `own` and begins where that waits
        for the last sequence's maximum.
        """
        batch, rank = self.latents.shape[0], self.latents.shape[2]
        chunks, heads = rank // BLOCK, queries.heads
        sums = nl.ndarray((BLOCK, chunks, batch, heads), dtype=dtype, buffer=nl.sbuf)
        shares = Shares(batch, heads)
        for sequence in range(batch):
            last = sequence == batch - 1
            scores = self._scored(queries, sequence, softmax_scale)
            turned = self.turned_maxima(scores)
            if last:
                early.take_own(own)
                early.begin()
            self.negate_maxima(turned, shares.negative[:, sequence, :])
            if last:
                shares.send_maxima()
            weights = self._weights(scores, shares.negative, sequence, queries.latent.dtype)
            target, total = sums[:, :, sequence, :], shares.weights[:, sequence, :]
            self._sum(weights, queries, sequence, target, total, shares if last else None)
        return sums, shares.result()

    def attend_alone(self, queries: Queries, softmax_scale: float) -> tuple[Any, Any, Any]:
        """`attend` over this core's slots alone."""
        chunks = self.latents.shape[2] // BLOCK
        parts = self._parts(queries, softmax_scale)
        return parts[:, :, 0:chunks, :], parts[:, :, chunks, :], parts[:, :, chunks + 1, :]

    def _parts(self, queries: Queries, softmax_scale: float) -> Any:
        """[128, B, rank / 128 + 2, heads] float32: sums of latents, their weight, the maximum."""
        batch, rank = self.latents.shape[0], self.latents.shape[2]
        chunks, heads = rank // BLOCK, queries.heads
        parts = nl.ndarray((BLOCK, batch, chunks + 2, heads), dtype=nl.float32, buffer=nl.sbuf)
        for sequence in range(batch):
            scores = self._scored(queries, sequence, softmax_scale)
            negative = nl.ndarray((BLOCK, 1, heads), dtype=nl.float32, buffer=nl.sbuf)
            self.negate_maxima(self.turned_maxima(scores), negative[:, 0, :])
            weights = self._weights(scores, negative, 0, queries.latent.dtype)
            top = parts[:, sequence, chunks + 1, :]
            nisa.tensor_scalar(dst=top, data=negative[:, 0, :], op0=nl.multiply, operand0=-1.0)
            sums, total = parts[:, sequence, 0:chunks, :], parts[:, sequence, chunks, :]
            self._sum(weights, queries, sequence, sums, total, None)
        return parts

    def _scored(self, queries: Queries, sequence: int, softmax_scale: float) -> Any:
        """A sequence's `_scores`; the next one's cache is loaded ahead."""
        self._load(sequence)
        if self.ahead:
            self._load(sequence + 1)
        return self._scores(self.caches[sequence], queries, sequence, softmax_scale)

    def _scores(self, cache: Any, queries: Queries, sequence: int, softmax_scale: float) -> Any:
        """Scaled and masked [128, count + tokens, heads] float32; last are new entries, on every partition."""
        heads, count = queries.heads, self.count
        penalty = self.penalties[sequence]
        scores = nl.ndarray((BLOCK, count + queries.tokens, heads), dtype=nl.float32, buffer=nl.sbuf)
        scale = scale_of(queries, sequence, softmax_scale)
        copies = cache.copies
        a_bank = BANK // heads // copies * copies
        for begin in range(0, count, a_bank):
            many = min(a_bank, count - begin)
            bank = nl.ndarray((BLOCK, many, heads), dtype=nl.float32, buffer=nl.psum)
            for tile in range(many):
                if begin == 0 and tile == many // 2:  # by now what it waits for is there
                    queries.complete()
                cache.score_latents(begin + tile, queries, sequence * heads, heads, bank[:, tile, :])
            for tile in range(0, many, copies):
                out = bank[:, tile : min(tile + copies, many), :]
                cache.score_keys((begin + tile) // copies, queries, sequence, out)
            target = scores[:, begin : begin + many, :]
            added = penalty.ap(pattern=[[count, BLOCK], [1, many], [0, heads]], offset=begin)
            if queries.tokens == 1 or queries.factor == None:
                nisa.scalar_tensor_tensor(
                    dst=target, data=bank, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=added
                )
                continue
            factors = scale.ap(pattern=[[heads, BLOCK], [0, many], [1, heads]])
            nisa.tensor_tensor(dst=target, data1=bank, data2=factors, op=nl.multiply)
            nisa.tensor_tensor(dst=target, data1=target, data2=added, op=nl.add)
        each = heads // queries.tokens
        for token in range(queries.tokens):
            out = scores[:, count + token, :]
            self._score_new(queries, sequence, token, out, scale)
            if token > 0:  # those before it do not attend to it
                nisa.memset(dst=out[:, 0 : token * each], value=MASKED)
        return scores

    def _penalty(self, limit: Any) -> Any:
        """[128, count]: 0 in slots below the limit float32 [128, 1], MASKED from it on."""
        slots = nl.ndarray((BLOCK, self.count), dtype=nl.float32, buffer=nl.sbuf)
        nisa.iota(dst=slots, pattern=[[1, self.count]], offset=self.first * BLOCK, channel_multiplier=self.count)
        penalty = nl.ndarray((BLOCK, self.count), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=penalty, data=slots, op0=nl.greater_equal, operand0=limit, op1=nl.multiply, operand1=MASKED
        )
        return penalty

    def _score_new(self, queries: Queries, sequence: int, token: int, out: Any, scale: Any) -> None:
        """Scores of a token's new entry, on core 0; MASKED on the other."""
        if nl.program_id() > 0:
            nisa.memset(dst=out, value=MASKED, engine=nisa.engine.gpsimd)
            return
        batch, heads = queries.new_key.shape[1], queries.heads
        rope, chunks = queries.new_key.shape[0], queries.latent.shape[1]
        entry = sequence * queries.tokens + token
        # As stationary operands of 128 equal columns, so that every partition has the score.
        latent = nl.ndarray((BLOCK, chunks, BLOCK), dtype=queries.new_latent.dtype, buffer=nl.sbuf)
        key = nl.ndarray((rope, BLOCK), dtype=queries.new_key.dtype, buffer=nl.sbuf)
        pattern = [[chunks * batch, BLOCK], [batch, chunks], [0, BLOCK]]
        source = queries.new_latent.ap(pattern=pattern, offset=entry)
        nisa.tensor_copy(dst=latent, src=source, engine=nisa.engine.scalar)
        source = queries.new_key.ap(pattern=[[batch, rope], [0, BLOCK]], offset=entry)
        nisa.tensor_copy(dst=key, src=source, engine=nisa.engine.gpsimd)
        score = nl.ndarray((BLOCK, heads), dtype=nl.float32, buffer=nl.psum)
        for chunk in range(chunks):
            nisa.nc_matmul(
                dst=score,
                stationary=latent[:, chunk, :],
                moving=queries.latent[:, chunk, sequence * heads : (sequence + 1) * heads],
                accumulate=chunk > 0,
            )
        nisa.nc_matmul(dst=score, stationary=key, moving=queries.rope[0:rope, 0, sequence, :], accumulate=True)
        if queries.tokens > 1 and queries.factor != None:
            nisa.tensor_tensor(dst=out, data1=score, data2=scale, op=nl.multiply)
            if self.absent != None:
                nisa.tensor_scalar(dst=out, data=out, op0=nl.add, operand0=self.absent[:, entry : entry + 1])
            return
        if self.absent == None:
            nisa.tensor_scalar(dst=out, data=score, op0=nl.multiply, operand0=scale)
            return
        absent = self.absent[:, entry : entry + 1]
        nisa.tensor_scalar(dst=out, data=score, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=absent)

    def _weights(self, scores: Any, negative: Any, sequence: int, dtype: Any) -> Any:
        """Exponentials [128, count + tokens, heads] of `dtype`.

        Args:
            scores: of `_scores`.
            negative: float32 [128, B, heads] in SBUF, whose `sequence` says what is added to a head's.
            sequence: see there.
            dtype: of the result.
        """
        heads, count = scores.shape[2], self.count
        weights = nl.ndarray(scores.shape, dtype=dtype, buffer=nl.sbuf)
        if heads == 1 or count >= _MANY_TILES:
            # The Scalar Engine subtracts a head's maximum itself.
            for head in range(heads):
                bias = negative[:, sequence, head : head + 1]
                nisa.activation(dst=weights[:, :, head], op=nl.exp, data=scores[:, :, head], bias=bias)
        else:
            shifted = nl.ndarray(scores.shape, dtype=nl.float32, buffer=nl.sbuf)
            pattern = [[negative.shape[1] * heads, BLOCK], [0, scores.shape[1]], [1, heads]]
            added = negative.ap(pattern=pattern, offset=sequence * heads)
            nisa.tensor_tensor(dst=shifted, data1=scores, data2=added, op=nl.add)
            nisa.activation(dst=weights, op=nl.exp, data=shifted)
        return weights

    def _sum(self, weights: Any, queries: Queries, sequence: int, sums: Any, total: Any, shares: Any) -> None:
        """Sums of latents over this core, [128, rank / 128, heads], and their weight, float32 [128, heads].

        `shares`, if given, are sent when the weight is known, which is early.
        """
        heads, chunks, count = queries.heads, sums.shape[1], self.count
        batch, cache, tokens = queries.new_latent.shape[2], self.caches[sequence], queries.tokens
        # The weight of what is summed: of the rounded exponentials.
        by_partition = nl.ndarray((BLOCK, heads), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=by_partition, op=nl.add, data=swapped(weights, count), axis=2)
        # The new entry lies in columns already, and needs no matmul.
        new = nl.ndarray((BLOCK, chunks, heads), dtype=nl.float32, buffer=nl.sbuf)
        if nl.program_id() == 0:
            for token in range(tokens):
                pattern = [[chunks * batch, BLOCK], [batch, chunks], [0, heads]]
                latent = queries.new_latent.ap(pattern=pattern, offset=sequence * tokens + token)
                pattern = [[(count + tokens) * heads, BLOCK], [0, chunks], [1, heads]]
                own = weights.ap(pattern=pattern, offset=(count + token) * heads)
                if token == 0:
                    nisa.tensor_tensor(dst=new, data1=latent, data2=own, op=nl.multiply)
                    continue
                one = nl.ndarray(new.shape, dtype=nl.float32, buffer=nl.sbuf)
                nisa.tensor_tensor(dst=one, data1=latent, data2=own, op=nl.multiply)
                nisa.tensor_tensor(dst=new, data1=new, data2=one, op=nl.add)
        in_psum = nl.ndarray((BLOCK, chunks, heads), dtype=nl.float32, buffer=nl.psum)
        for tile in range(count):
            for chunk in range(chunks):
                nisa.nc_matmul(
                    dst=in_psum[:, chunk, :],
                    stationary=cache.tiles[tile][:, chunk * BLOCK : (chunk + 1) * BLOCK],
                    moving=weights[:, tile, :],
                    accumulate=tile > 0,
                )
            if tile == min(_TILES_BEFORE_WEIGHT, count) - 1:
                whole = nl.ndarray((BLOCK, heads), dtype=nl.float32, buffer=nl.psum)
                sum_partitions(whole, self.ones, by_partition)
                nisa.tensor_tensor(dst=total, data1=whole, data2=weights[:, count, :], op=nl.add)
                for token in range(1, tokens):
                    nisa.tensor_tensor(dst=total, data1=total, data2=weights[:, count + token, :], op=nl.add)
                if shares != None:
                    shares.send_weights()
        if nl.program_id() == 0:
            nisa.tensor_tensor(dst=sums, data1=in_psum, data2=new, op=nl.add)
        else:
            nisa.tensor_copy(dst=sums, src=in_psum)

    def turned_maxima(self, scores: Any) -> Any:
        """Each partition's largest score of each head, [heads, 128] in PSUM: what `negate_maxima` is given.

        It is rounded to the cache's dtype: what exponentials are divided by cancels.
        """
        heads, dtype = scores.shape[2], self.identity.dtype
        by_partition = nl.ndarray((BLOCK, heads), dtype=dtype, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=by_partition, op=nl.maximum, data=swapped(scores, scores.shape[1]), axis=2)
        turned = nl.ndarray((heads, BLOCK), dtype=dtype, buffer=nl.psum)
        nisa.nc_matmul(dst=turned, stationary=by_partition, moving=self.identity, is_transpose=True)
        return turned

    def negate_maxima(self, turned: Any, negative: Any) -> None:
        """The largest score of each head, times -1, on every partition: float32 [128, heads] in SBUF."""
        heads, dtype = turned.shape[0], self.identity.dtype
        top = nl.ndarray((heads, 1), dtype=nl.float32 if heads > 1 else dtype, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=top, op=nl.maximum, data=turned, axis=1)
        moving = top
        if heads > 1:  # ones times the diagonal matrix of the maxima
            moving = nl.ndarray((heads, heads), dtype=dtype, buffer=nl.sbuf)
            nisa.tensor_scalar(dst=moving, data=self.identity[0:heads, 0:heads], op0=nl.multiply, operand0=top)
        spread_out = nl.ndarray((BLOCK, heads), dtype=nl.float32, buffer=nl.psum)
        sum_partitions(spread_out, self.near_ones[0:heads, :], moving)
        nisa.tensor_scalar(dst=negative, data=spread_out, op0=nl.multiply, operand0=-1.0)


def scale_of(queries: Queries, sequence: int, softmax_scale: float) -> Any:
    """What scores are multiplied by: a number, or float32 [128, 1]; of several tokens [128, heads]."""
    if queries.factor == None:
        return softmax_scale
    if queries.tokens > 1:
        tokens, each = queries.tokens, queries.heads // queries.tokens
        by_head = nl.ndarray((BLOCK, tokens, each), dtype=nl.float32, buffer=nl.sbuf)
        pattern = [[queries.factor.shape[1], BLOCK], [1, tokens], [0, each]]
        factors = queries.factor.ap(pattern=pattern, offset=sequence * tokens)
        nisa.tensor_scalar(dst=by_head, data=factors, op0=nl.multiply, operand0=softmax_scale)
        return by_head.reshape((BLOCK, queries.heads))
    scale = nl.ndarray((BLOCK, 1), dtype=nl.float32, buffer=nl.sbuf)
    factor = queries.factor[:, sequence : sequence + 1]
    nisa.tensor_scalar(dst=scale, data=factor, op0=nl.multiply, operand0=softmax_scale)
    return scale


class Shares(nl.NKIObject):  # type: ignore[misc]
    """What a core's sums are to be multiplied by, so that those of both cores add up; as little as is needed is sent.

    Attributes:
        negative: float32 [128, B, heads], this core's maxima times -1.
        weights: the same of its sums' weights.
    """

    maxima: Any
    others: Any

    def __init__(self, batch: int, heads: int) -> None:
        shape = (BLOCK, batch, heads)
        self.negative = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        self.weights = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        self.maxima = None
        self.others = None

    def send_maxima(self) -> None:
        """Exchange the maxima with the other core."""
        if nl.num_programs() > 1:
            self.maxima = from_other_core(self.negative)

    def send_weights(self) -> None:
        """Exchange the weights."""
        if nl.num_programs() > 1:
            self.others = from_other_core(self.weights)

    def result(self) -> Any:
        """1 / (weight + the other's weight * exp(its maximum - mine)): float32 [128, B, heads]."""
        shares = nl.ndarray(self.weights.shape, dtype=nl.float32, buffer=nl.sbuf)
        if self.others == None:
            nisa.reciprocal(dst=shares, data=self.weights)
            return shares
        nisa.tensor_tensor(dst=shares, data1=self.negative, data2=self.maxima, op=nl.subtract)
        nisa.tensor_scalar(dst=shares, data=shares, op0=nl.minimum, operand0=LARGEST_POWER)
        nisa.activation(dst=shares, op=nl.exp, data=shares)
        nisa.tensor_tensor(dst=shares, data1=shares, data2=self.others, op=nl.multiply)
        nisa.tensor_tensor(dst=shares, data1=shares, data2=self.weights, op=nl.add)
        nisa.reciprocal(dst=shares, data=shares)
        return shares


def _join(mine: Any, theirs: Any) -> None:
    """Both cores' [128, B, sums | weight | maximum, heads], into the first, under the common maximum."""
    rows, batch, last, heads = mine.shape
    top = nl.ndarray((rows, batch, heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=top, data1=mine[:, :, last - 1, :], data2=theirs[:, :, last - 1, :], op=nl.maximum)
    _rescale(mine, top)
    _rescale(theirs, top)
    kept = mine[:, :, 0 : last - 1, :]
    nisa.tensor_tensor(dst=kept, data1=kept, data2=theirs[:, :, 0 : last - 1, :], op=nl.add)
    nisa.tensor_copy(dst=mine[:, :, last - 1, :], src=top)


def _rescale(part: Any, top: Any) -> None:
    """One core's sums and weight under the common maximum `top`."""
    last = part.shape[2]
    factor = nl.ndarray(top.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=factor, data1=part[:, :, last - 1, :], data2=top, op=nl.subtract)
    nisa.activation(dst=factor, op=nl.exp, data=factor)
    sums = part[:, :, 0 : last - 1, :]
    nisa.tensor_tensor(dst=sums, data1=sums, data2=over_sums(factor, last - 1), op=nl.multiply)


def normalized(sums: Any, total: Any, dtype: Any) -> Any:
    """Sums over their weights, as columns [128, rank / 128, B * heads] of `dtype`."""
    rows, batch, chunks, heads = sums.shape
    divisor = nl.ndarray((rows, batch, heads), dtype=nl.float32, buffer=nl.sbuf)
    nisa.reciprocal(dst=divisor, data=total)
    result = nl.ndarray((rows, chunks, batch, heads), dtype=dtype, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=split(result), data1=sums, data2=over_sums(divisor, chunks), op=nl.multiply)
    return result.reshape((rows, chunks, batch * heads))
