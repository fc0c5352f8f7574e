"""One layer over a batch of vLLM's: the layer of our decode step, with attention over pages and any new tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.engine.layer_step import LayerStep, Place, Reduce
from kimi_k2.model.attention import absorbed_is_cheaper
from kimi_k2.model.decoder import DecoderLayer
from kimi_k2.ops.cache import to_cache
from kimi_k2.ops.linear import add_project, project
from kimi_k2.ops.mla import (
    absorb,
    cache_entries,
    mla_absorbed_attention,
    mla_naive_attention,
    rotated_queries,
    value_heads,
)
from kimi_k2.ops.mla_paged import gather_pages, paged_attend_values, paged_query_and_entry, write_places
from kimi_k2.ops.norm import rms_norm
from kimi_k2.serving.vllm.attention import Batch, LatentAttention


class PagedLayer(LayerStep):
    """A layer for the new tokens of a batch.

    Args:
        layer, reduce: as `LayerStep` takes them.
        held: the layer's cache.
    """

    def __init__(self, layer: DecoderLayer, reduce: Reduce, held: LatentAttention) -> None:
        super().__init__(layer, reduce)
        self.held = held

    def attend(self, x: Tensor, delta: Tensor | None, place: Place, cache: Tensor) -> tuple[Tensor, Tensor]:
        """The attention half before the sum over ranks [T, H], and the residual x + delta; `cache` in pages."""
        norm = self.layer.input_layernorm
        qkv_a, x = add_project(x, delta, self.qkv_a, norm.weight, norm.eps)
        batch = self.held.batch()
        width = self.w_uv.shape[0] * self.w_uv.shape[1]
        if batch is None:  # vLLM measures memory; there is no cache yet
            return project(qkv_a.new_zeros(len(x), width), self.o), x
        one = batch.decodes
        if not batch.lengths and one == len(x):
            return project(self._decode(qkv_a, place, cache, batch), self.o), x
        values = qkv_a.new_zeros(len(x), width)
        if one:
            values[:one] = self._decode(qkv_a[:one], place, cache, batch)
        if batch.lengths:
            rest = slice(one, batch.query_start[-1])
            self._read(qkv_a[rest], place.cos[rest], place.sin[rest], cache, batch, values[rest])
        return project(values, self.o), x

    def _decode(self, qkv_a: Tensor, place: Place, cache: Tensor, batch: Batch) -> Tensor:
        """Values [B, H * v_head_dim] of the sequences with one new token, which is stored."""
        attention, one = self.attention, batch.decodes
        q_norm, kv_norm = attention.q_a_layernorm, attention.kv_a_layernorm
        query = paged_query_and_entry(
            qkv_a, q_norm.weight, self.q_b, kv_norm.weight, place.cos[:one], place.sin[:one], batch.slots[:one],
            self.w_uk, cache, q_norm.eps, kv_norm.eps,
        )  # fmt: skip
        table, seq_lens = batch.block_table[:one], batch.seq_lens[:one]
        scale = attention.config.softmax_scale
        return paged_attend_values(query, cache, table, seq_lens, self.w_uv, scale, place.plan)

    def _read(self, qkv_a: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, batch: Batch, values: Tensor) -> None:
        """Store the new tokens of the sequences with several, and fill in their values [T, H * v_head_dim]."""
        attention, config, one = self.attention, self.attention.config, batch.decodes
        q_norm, kv_norm = attention.q_a_layernorm, attention.kv_a_layernorm
        q_a, latent, k_rope = qkv_a.split([config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        q = project(q_a, self.q_b, q_norm.weight, q_norm.eps).view(len(qkv_a), 1, -1, config.qk_head_dim)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q_nope, q_rope = rotated_queries(q, config.qk_nope_head_dim, cos, sin)
        normed = rms_norm(latent.contiguous(), kv_norm.weight, kv_norm.eps).unsqueeze(1)
        entries = cache_entries(normed, k_rope.unsqueeze(1), cos, sin).squeeze(1)
        entries = to_cache(entries, cache.dtype)
        rows, positions, places = batch.prompts(cache.shape[1])
        write_places(cache, entries, places)
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
