"""Dense MLA decode over the latent cache, on queries and new entries that lie in SBUF.

A sequence's cache is read once. Its transposes need no query, so they come first: under a kernel's own order they run
while the queries are still on their way. Sums of latents come out as columns, as W_UV contracts them.
"""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.columns import BANK, BLOCK, all_ones, sum_partitions
from kimi_k2.nki.kernels.exchange import from_other_core
from kimi_k2.nki.kernels.latent_cache import Cache, Queries
from kimi_k2.nki.kernels.views import bytes_of, on_partitions, swapped

# Added to the score of a slot that is not in use; its exponential is 0 beside any real score.
MASKED = -30000.0
# Bytes a partition for caches and their transposes.
_CACHE_BYTES = 160 * 1024
# Tiles whose sums come before the weight's, so that the Tensor Engine does not wait for it.
_TILES_BEFORE_WEIGHT = 1
# Of e: times a weight it stays finite in float32, and what it is divided by is lost in it.
LARGEST_POWER = 70.0
# Tiles from which on an exponential a head costs less than a subtraction for all.
_MANY_TILES = 32


class LatentAttention(nl.NKIObject):  # type: ignore[misc]
    """Attention of B sequences, one token each or several, to caches [B, S, rank] and [B, S, rope] and new entries.

    A token attends to its own new entry and to those of its sequence's tokens before it.

    Args:
        step: the kernel's `Step`, whose `own` says where new entries take part; None: everywhere.
        latents, keys: in HBM.
        first, count: tiles of 128 slots of this core.
        pages: `Pages` where caches lie so, whose parts are `latents` and `keys`.
    """

    absent: Any
    caches: list[Any]

    def __init__(self, step: Any, latents: Any, keys: Any, first: int, count: int, pages: Any) -> None:
        self.pages = pages
        self.latents, self.keys = latents, keys
        self.first, self.count = first, count
        self.identity, self.ones = step.identity, step.ones
        self.near_ones = step.ones if step.dtype == nl.float32 else all_ones(step.dtype)
        batch, rank = latents.shape[0], latents.shape[2]
        size = bytes_of(latents.dtype)
        entry = (rank + keys.shape[2]) * size
        turned = (rank // BLOCK + 1) * BLOCK * size
        self.turns_first = count * (entry + turned) <= _CACHE_BYTES
        self.ahead = 2 * count * (entry + turned) <= _CACHE_BYTES
        self.caches = []
        self.penalties = []
        limits = self._numbers(step.lengths)
        for sequence in range(batch):
            self.caches.append(None)
            self.penalties.append(self._penalty(limits[:, sequence : sequence + 1]))
        self.absent = None
        if step.own != None:  # 0 where the new entry takes part, MASKED where it does not
            self.absent = self._numbers(step.own)
            nisa.tensor_scalar(
                dst=self.absent, data=self.absent, op0=nl.multiply, operand0=-MASKED, op1=nl.add, operand1=MASKED
            )
        self.caches[0] = self._cache(0)

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

    def _cache(self, sequence: int) -> Cache:
        return Cache(self.latents, self.keys, sequence, self.first, self.count, self.identity, self.pages)

    def _load(self, sequence: int) -> None:
        if sequence >= self.latents.shape[0] or self.caches[sequence] != None:
            return
        cache = self._cache(sequence)
        if self.turns_first:
            for tile in range(self.count):
                cache.turn(tile)
        self.caches[sequence] = cache

    def attend(
        self, queries: Queries, softmax_scale: float, dtype: Any, join: bool = True, early: Any = None, own: Any = None,
    ) -> tuple[Any, Any]:  # fmt: skip
        """Sums over this core's slots alone, [128, rank / 128, B, heads] of `dtype`, and their `Shares`.

        Where the shares are joined, the cores exchange maxima and weights while the Tensor Engine still sums. `early`,
        the router's `EarlyLogits`, takes `own` and begins where that waits for the last sequence's maximum.
        """
        batch, rank = self.latents.shape[0], self.latents.shape[2]
        chunks, heads = rank // BLOCK, queries.heads
        sums = nl.ndarray((BLOCK, chunks, batch, heads), dtype=dtype, buffer=nl.sbuf)
        shares = Shares(batch, heads)
        for sequence in range(batch):
            last = sequence == batch - 1
            self._load(sequence)
            if self.ahead:
                self._load(sequence + 1)
            scores = self._scores(self.caches[sequence], queries, sequence, softmax_scale)
            turned = self.turned_maxima(scores)
            if last and early != None:
                early.take_own(own)
                early.begin()
            self.negate_maxima(turned, shares.negative[:, sequence, :])
            if last and join:
                shares.send_maxima()
            weights = self._weights(scores, shares.negative, sequence, queries.latent.dtype)
            target, total = sums[:, :, sequence, :], shares.weights[:, sequence, :]
            self._sum(weights, queries, sequence, target, total, shares if last and join else None)
        return sums, shares

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
            if queries.tokens == 1:
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
        if queries.tokens > 1:
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
                more = nl.ndarray(new.shape, dtype=nl.float32, buffer=nl.sbuf)
                nisa.tensor_tensor(dst=more, data1=latent, data2=own, op=nl.multiply)
                nisa.tensor_tensor(dst=new, data1=new, data2=more, op=nl.add)
        in_psum = nl.ndarray((BLOCK, chunks, heads), dtype=nl.float32, buffer=nl.psum)
        for tile in range(count):
            for chunk in range(chunks):
                nisa.nc_matmul(
                    dst=in_psum[:, chunk, :],
                    stationary=cache.tiles[tile][chunk],
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
    """What scores are multiplied by: float32 [128, 1]; of several tokens [128, heads]."""
    if queries.tokens > 1:
        tokens, each = queries.tokens, queries.heads // queries.tokens
        by_head = nl.ndarray((BLOCK, tokens, each), dtype=nl.float32, buffer=nl.sbuf)
        pattern = [[2 * queries.factor.shape[2], BLOCK], [1, tokens], [0, each]]
        factors = queries.factor.ap(pattern=pattern, offset=sequence * tokens)
        nisa.tensor_scalar(dst=by_head, data=factors, op0=nl.multiply, operand0=softmax_scale)
        return by_head.reshape((BLOCK, queries.heads))
    scale = nl.ndarray((BLOCK, 1), dtype=nl.float32, buffer=nl.sbuf)
    factor = queries.factor[:, 0, sequence : sequence + 1]
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
