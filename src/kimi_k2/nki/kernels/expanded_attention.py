"""MLA decode of one sequence and one head whose latents become the head's keys and values while a collective runs.

A query then meets one block of 128 values a slot in place of the latent's four, twice. That makes the Tensor Engine do
more in all, but little of it behind the collective. What the two cores of LNC=2 exchange is not waited for before
o_proj, which is linear.
"""

from __future__ import annotations

from typing import Any

import nki.isa as nisa
import nki.language as nl

from kimi_k2.nki.kernels.columns import BANK, BLOCK, sum_partitions
from kimi_k2.nki.kernels.latent_attention import LARGEST_POWER, LatentAttention, Shares, scale_of

# Of 128 slots, of a core: what a collective of 15 us hides.
MOST_TILES = 16
# Tiles whose sums come before the weight's, so that the Tensor Engine does not wait for it.
_TILES_BEFORE_WEIGHT = 4


class ExpandedAttention(nl.NKIObject):  # type: ignore[misc]
    """Attention of one sequence, with W_UK and W_UV of one head; other arguments as those of `LatentAttention`.

    Args:
        w_uk: [128, 1, rank] in SBUF, without scales.
        w_uv: [128, rank / 128, 128] in SBUF, without scales.
    """

    turned_uk: Any
    head_keys: Any
    head_values: Any

    def __init__(
        self, step: Any, latents: Any, keys: Any, first: int, count: int, pages: Any, w_uk: Any, w_uv: Any
    ) -> None:
        self.latent = LatentAttention(step, latents, keys, first, count, pages)
        self.count, self.identity, self.ones = count, step.identity, step.ones
        self.w_uk, self.w_uv = w_uk, w_uv
        self.turned_uk = None
        self.head_keys = None
        self.head_values = None

    def turn(self) -> None:
        """Make keys [128, tiles, slots] and values [slots, tiles, 128] of the cache."""
        cache, chunks = self.latent.caches[0], self.w_uv.shape[1]
        dtype = self.identity.dtype
        self.turned_uk = self._turned_weight(chunks, dtype)
        # All tiles first, so that the Tensor Engine does not wait for what it has transposed.
        self.latent.turn()
        self.head_keys = nl.ndarray((BLOCK, self.count, BLOCK), dtype=dtype, buffer=nl.sbuf)
        self.head_values = nl.ndarray((BLOCK, self.count, BLOCK), dtype=dtype, buffer=nl.sbuf)
        a_bank = BANK // BLOCK
        for begin in range(0, self.count, a_bank):
            many = min(a_bank, self.count - begin)
            keys = nl.ndarray((BLOCK, many, BLOCK), dtype=nl.float32, buffer=nl.psum)
            values = nl.ndarray((BLOCK, many, BLOCK), dtype=nl.float32, buffer=nl.psum)
            for tile in range(many):
                turned = cache.turned[begin + tile]
                for chunk in range(chunks):
                    nisa.nc_matmul(
                        dst=keys[:, tile, :],
                        stationary=self.turned_uk[:, chunk, :],
                        moving=turned[:, chunk, :],
                        accumulate=chunk > 0,
                    )
                for chunk in range(chunks):
                    nisa.nc_matmul(
                        dst=values[:, tile, :],
                        stationary=turned[:, chunk, :],
                        moving=self.w_uv[:, chunk, :],
                        accumulate=chunk > 0,
                    )
            end = begin + many
            nisa.tensor_copy(dst=self.head_keys[:, begin:end, :], src=keys, engine=nisa.engine.scalar)
            nisa.tensor_copy(dst=self.head_values[:, begin:end, :], src=values, engine=nisa.engine.vector)

    def _turned_weight(self, chunks: int, dtype: Any) -> Any:
        """W_UK transposed, [128, rank / 128, 128]."""
        turned = nl.ndarray((BLOCK, chunks, BLOCK), dtype=dtype, buffer=nl.sbuf)
        in_psum = nl.ndarray(turned.shape, dtype=dtype, buffer=nl.psum)
        for chunk in range(chunks):
            piece = self.w_uk[:, 0, chunk * BLOCK : (chunk + 1) * BLOCK]
            nisa.nc_matmul(dst=in_psum[:, chunk, :], stationary=piece, moving=self.identity, is_transpose=True)
        nisa.tensor_copy(dst=turned, src=in_psum)
        return turned

    def attend_values(self, queries: Any, softmax_scale: float, dtype: Any, early: Any, own: Any) -> tuple[Any, Shares]:
        """Sums of values over this core's slots alone, [128, 1, 1] of `dtype`, and what they are to be multiplied by.

        Args:
            queries: `latent` is [128, 1, 1], the head's query without position.
            softmax_scale: of the configuration.
            dtype: of the result.
            early: `EarlyLogits`, which takes `own` where the Tensor Engine waits for exponentials, and begins where it
                waits for the result.
            own: `OwnColumns`.
        """
        mine = nl.program_id() == 0
        scale = scale_of(queries, 0, softmax_scale)
        scores = self._head_scores(queries, scale)
        shares = Shares(1, 1)
        negative, total = shares.negative[:, 0, :], shares.weights[:, 0, :]
        turned = self.latent.turned_maxima(scores)
        new_key = None
        new_value = None
        if mine:
            new_key = self._through(self.turned_uk, queries.new_latent)
        self.latent.negate_maxima(turned, negative)
        if mine:
            new_value = self._through(self.w_uv, queries.new_latent)
        early.take_own(own)
        shares.send_maxima()
        weights = nl.ndarray((BLOCK, self.count), dtype=queries.latent.dtype, buffer=nl.sbuf)
        nisa.activation(dst=weights, op=nl.exp, data=scores[:, :, 0], bias=negative)
        by_partition = nl.ndarray((BLOCK, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=by_partition, op=nl.add, data=weights, axis=1)
        whole = nl.ndarray((BLOCK, 1), dtype=nl.float32, buffer=nl.psum)
        sums = nl.ndarray((BLOCK, 1), dtype=nl.float32, buffer=nl.psum)
        begun = min(_TILES_BEFORE_WEIGHT, self.count)
        self._sum_values(weights, sums, 0, begun)
        sum_partitions(whole, self.ones, by_partition)
        power = None
        if mine:
            power = self._power(queries, new_key, scale, negative)
            nisa.tensor_tensor(dst=total, data1=whole, data2=power, op=nl.add)
        else:
            nisa.tensor_copy(dst=total, src=whole)
        shares.send_weights()
        self._sum_values(weights, sums, begun, self.count)
        early.begin()
        values = nl.ndarray((BLOCK, 1, 1), dtype=dtype, buffer=nl.sbuf)
        if mine:
            sbuf_value = nl.ndarray((BLOCK, 1), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_copy(dst=sbuf_value, src=new_value, engine=nisa.engine.scalar)
            nisa.scalar_tensor_tensor(
                dst=values[:, 0, :], data=sbuf_value, op0=nl.multiply, operand0=power, op1=nl.add, operand1=sums
            )
        else:
            nisa.tensor_copy(dst=values[:, 0, :], src=sums)
        return values, shares

    def _head_scores(self, queries: Any, scale: Any) -> Any:
        """Scaled and masked [128, count, 1] float32."""
        cache, count = self.latent.caches[0], self.count
        bank = nl.ndarray((BLOCK, count, 1), dtype=nl.float32, buffer=nl.psum)
        for tile in range(count):
            stationary, moving = self.head_keys[:, tile, :], queries.latent[:, 0, :]
            nisa.nc_matmul(dst=bank[:, tile, :], stationary=stationary, moving=moving, accumulate=False)
        queries.complete()
        for tile in range(0, count, cache.copies):
            out = bank[:, tile : min(tile + cache.copies, count), :]
            cache.score_keys(tile // cache.copies, queries, 0, out)
        scores = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
        penalty = self.latent.penalties[0].reshape((BLOCK, count, 1))
        nisa.scalar_tensor_tensor(dst=scores, data=bank, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=penalty)
        return scores

    def _sum_values(self, weights: Any, sums: Any, begin: int, end: int) -> None:
        for tile in range(begin, end):
            stationary, moving = self.head_values[:, tile, :], weights[:, tile : tile + 1]
            nisa.nc_matmul(dst=sums, stationary=stationary, moving=moving, accumulate=tile > 0)

    def _through(self, weight: Any, latent: Any) -> Any:
        """A weight [128, rank / 128, 128] times the new entry's latents: float32 [128, 1] in PSUM."""
        out = nl.ndarray((BLOCK, 1), dtype=nl.float32, buffer=nl.psum)
        for chunk in range(weight.shape[1]):
            moving = latent[:, chunk, :]
            nisa.nc_matmul(dst=out, stationary=weight[:, chunk, :], moving=moving, accumulate=chunk > 0)
        return out

    def _power(self, queries: Any, new_key: Any, scale: Any, negative: Any) -> Any:
        """The new entry's exponential on every partition, float32 [128, 1].

        It takes no part in the maximum, which may be far below its score.
        """
        rope = queries.new_key.shape[0]
        terms = nl.ndarray((BLOCK, 2), dtype=nl.float32, buffer=nl.sbuf)
        rotary = queries.rope[0:rope, 0, 0, :]
        nisa.tensor_tensor(
            dst=terms[0:rope, 1:2], data1=queries.new_key, data2=rotary, op=nl.multiply, engine=nisa.engine.gpsimd
        )
        nisa.tensor_tensor(dst=terms[:, 0:1], data1=new_key, data2=queries.latent[:, 0, :], op=nl.multiply)
        score = nl.ndarray((BLOCK, 1), dtype=nl.float32, buffer=nl.psum)
        sum_partitions(score, self.ones[0:rope, :], terms[0:rope, 1:2])
        sum_partitions(score, self.ones, terms[:, 0:1], accumulate=True)
        power = nl.ndarray((BLOCK, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(dst=power, data=score, op0=nl.multiply, operand0=scale, op1=nl.add, operand1=negative)
        nisa.tensor_scalar(dst=power, data=power, op0=nl.minimum, operand0=LARGEST_POWER)
        nisa.activation(dst=power, op=nl.exp, data=power)
        return power
