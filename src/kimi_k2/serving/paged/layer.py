"""One layer over an engine's batch: the layer of our decode step, with attention over pages and any new tokens."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kimi_k2.engine.layer_step import LayerStep, Place, Reduce
from kimi_k2.model.attention import absorbed_is_cheaper
from kimi_k2.model.decoder import DecoderLayer
from kimi_k2.ops.cache import gather_pages, store_slots, to_cache
from kimi_k2.ops.linear import add_project, project
from kimi_k2.ops.mla import (
    absorb,
    cache_entries,
    mla_absorbed_attention,
    mla_naive_attention,
    rotated_queries,
    value_heads,
)
from kimi_k2.ops.mla_decode import attend_values, query_and_entry
from kimi_k2.ops.mla_ragged import mla_ragged_attention
from kimi_k2.ops.norm import rms_norm
from kimi_k2.serving.paged.batch import Batch


class Held(Protocol):
    """A layer's cache in an engine's hands."""

    @property
    def cache(self) -> Tensor:
        """[pages, slots a page, cache_dim]."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the cache."""
        ...

    def batch(self) -> Batch | None:
        """What this step computes; None while the engine measures memory, when there is no cache yet."""
        ...


class Projected(NamedTuple):
    """What attention takes of a layer's T new tokens.

    Attributes:
        qkv_a: [T, q_lora_rank + cache_dim], outputs of q_a and kv_a.
        q: [T, 1, H, qk_head_dim] queries, the last of each rotated.
        entries: [T, cache_dim], what the cache is to hold.
    """

    qkv_a: Tensor
    q: Tensor
    entries: Tensor


class PagedLayer(LayerStep):
    """A layer for the new tokens of a batch.

    Args:
        layer, reduce: as `LayerStep` takes them.
        held: the layer's cache.
    """

    def __init__(self, layer: DecoderLayer, reduce: Reduce, held: Held) -> None:
        super().__init__(layer, reduce)
        self.held = held

    @property
    def width(self) -> int:
        """Values of a token, H * v_head_dim."""
        heads, value = self.w_uv.shape[:2]
        return int(heads * value)

    def attend(self, x: Tensor, delta: Tensor | None, place: Place, cache: Tensor) -> tuple[Tensor, Tensor]:
        """The attention half before the sum over ranks [T, H], and the residual x + delta; `cache` in pages."""
        batch = self.held.batch()
        if batch is not None and batch.lengths:
            made, x = self.enter(x, delta, place.cos, place.sin)
            values = x.new_zeros(len(x), self.width)
            self.attend_batch(made, place, batch, values)
            return project(values, self.o), x
        norm = self.layer.input_layernorm
        qkv_a, x = add_project(x, delta, self.qkv_a, norm.weight, norm.eps)
        if batch is None:  # the engine measures memory; there is no cache yet
            return project(qkv_a.new_zeros(len(x), self.width), self.o), x
        values = self._decode(qkv_a[: batch.decodes], place, cache, batch)
        if batch.decodes < len(x):
            values = torch.nn.functional.pad(values, (0, 0, 0, len(x) - batch.decodes))
        return project(values, self.o), x

    def enter(self, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor) -> tuple[Projected, Tensor]:
        """Before attention: what it takes of each new token by itself, and the residual x + delta."""
        attention, config, norm = self.attention, self.attention.config, self.layer.input_layernorm
        qkv_a, x = add_project(x, delta, self.qkv_a, norm.weight, norm.eps)
        q_norm, kv_norm = attention.q_a_layernorm, attention.kv_a_layernorm
        q_a, latent, k_rope = qkv_a.split([config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        q = project(q_a, self.q_b, q_norm.weight, q_norm.eps).view(len(x), 1, -1, config.qk_head_dim)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q_nope, q_rope = rotated_queries(q, config.qk_nope_head_dim, cos, sin, in_place=True)
        if q_rope.data_ptr() != q[..., config.qk_nope_head_dim :].data_ptr():  # not in its place
            q = torch.cat((q_nope, q_rope), dim=-1)
        normed = rms_norm(latent.contiguous(), kv_norm.weight, kv_norm.eps).unsqueeze(1)
        entries = cache_entries(normed, k_rope.unsqueeze(1), cos, sin).squeeze(1)
        return Projected(qkv_a, q, to_cache(entries, self.held.dtype)), x

    def leave(self, x: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Behind attention, whose values are [T, H * v_head_dim]: as a call of the layer returns."""
        return self.finish(x, project(values, self.o))

    def attend_batch(self, made: Projected, place: Place, batch: Batch, values: Tensor) -> None:
        """Store a batch's new tokens and fill in their values [T, H * v_head_dim]; padding behind them stays."""
        one, cache = batch.decodes, self.held.cache
        if one:
            values[:one] = self._decode(made.qkv_a[:one], place, cache, batch)
        if batch.lengths:
            rest = slice(one, batch.query_start[-1])
            self._read(made.q[rest], made.entries[rest], cache, batch, values[rest])

    def _decode(self, qkv_a: Tensor, place: Place, cache: Tensor, batch: Batch) -> Tensor:
        """Values [B, H * v_head_dim] of the sequences with one new token, which is stored."""
        attention, one = self.attention, batch.decodes
        q_norm, kv_norm = attention.q_a_layernorm, attention.kv_a_layernorm
        query = query_and_entry(
            qkv_a, q_norm.weight, self.q_b, kv_norm.weight, place.cos[:one], place.sin[:one], batch.slots[:one],
            self.w_uk, cache, q_norm.eps, kv_norm.eps,
        )  # fmt: skip
        table, seq_lens = batch.block_table[:one], batch.seq_lens[:one]
        scale = attention.config.softmax_scale
        return attend_values(query, cache, seq_lens, self.w_uv, scale, place.plan, table)

    def _read(self, q: Tensor, entries: Tensor, cache: Tensor, batch: Batch, values: Tensor) -> None:
        """Store the new tokens of the sequences with several, and fill in their values [T, H * v_head_dim]."""
        one, config = batch.decodes, self.attention.config
        q_nope, q_rope = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        rows, positions, slots, together = batch.prompts(cache.shape[1])
        store_slots(cache, entries, slots)
        if together is not None:
            slots = entries if together.places is None else cache[together.places].to(values.dtype)
            parts = q_nope.squeeze(1), q_rope.squeeze(1), slots, torch.cat((self.w_uk, self.w_uv), dim=1)
            found = mla_ragged_attention(*parts, together.queries, together.keys, config.softmax_scale)
            values.copy_(found.flatten(1))
            return
        for number, (at, length) in enumerate(zip(rows, batch.lengths, strict=True)):
            new = at.stop - at.start
            if not new:
                continue
            if new == length:  # its cache is what has just been stored
                slots = entries[at].unsqueeze(0)
            else:
                slots = gather_pages(cache, batch.block_table[one + number : one + number + 1], length)
            given = q_nope[at].transpose(0, 1), q_rope[at].transpose(0, 1)
            values[at] = self._sequence(*given, slots.to(values.dtype), positions[number])

    def _sequence(self, q_nope: Tensor, q_rope: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
        """The last [1, S, H, ...] of a sequence, at positions [1, S], over its slots [1, T, C]: [S, H * v_head_dim]."""
        config, (new, length) = self.attention.config, (q_nope.shape[1], slots.shape[1])
        if absorbed_is_cheaper(config, new, length):
            q_latent = absorb(q_nope, self.w_uk)
            summed = mla_absorbed_attention(q_latent, q_rope, slots, positions, config.softmax_scale)
            return value_heads(summed, self.w_uv).flatten(2).squeeze(0)
        kv_b = torch.cat((self.w_uk, self.w_uv), dim=1)
        values = mla_naive_attention(q_nope, q_rope, slots, kv_b, positions, config.softmax_scale, whole=True)
        return values.flatten(2).squeeze(0)
