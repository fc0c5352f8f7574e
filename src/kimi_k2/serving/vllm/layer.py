"""One layer over a batch of vLLM's: the layer of our decode step, with attention over pages and any new tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.engine.layer_step import LayerStep, Place, Reduce
from kimi_k2.model.attention import absorbed_is_cheaper
from kimi_k2.model.decoder import DecoderLayer
from kimi_k2.ops.linear import add_project, project
from kimi_k2.ops.mla import (
    absorb,
    cache_entries,
    mla_absorbed_attention,
    mla_naive_attention,
    rotated_queries,
    value_heads,
)
from kimi_k2.ops.mla_decode import value_rows
from kimi_k2.ops.mla_paged import gather_pages, paged_mla_decode, store_pages
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
        attention, norm = self.attention, self.layer.input_layernorm
        config, q_norm, kv_norm = attention.config, attention.q_a_layernorm, attention.kv_a_layernorm
        qkv_a, x = add_project(x, delta, self.qkv_a, norm.weight, norm.eps)
        q_a, latent, k_rope = qkv_a.split([config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        q = project(q_a.contiguous(), self.q_b, q_norm.weight, q_norm.eps).view(len(x), 1, -1, config.qk_head_dim)
        cos, sin = place.cos.unsqueeze(1), place.sin.unsqueeze(1)
        q_nope, q_rope = rotated_queries(q, config.qk_nope_head_dim, cos, sin)
        batch = self.held.batch()
        if batch is None:  # vLLM measures memory; there is no cache yet
            return project(q_nope.new_zeros(len(x), self.w_uv.shape[0] * config.v_head_dim), self.o), x
        normed = rms_norm(latent.contiguous(), kv_norm.weight, kv_norm.eps).unsqueeze(1)
        entries = cache_entries(normed, k_rope.unsqueeze(1), cos, sin).squeeze(1)
        store_pages(cache, entries[: len(batch.slots)], batch.slots)
        values = self._values(q_nope.squeeze(1), q_rope.squeeze(1), cache, batch)
        return project(values, self.o), x

    def _values(self, q_nope: Tensor, q_rope: Tensor, cache: Tensor, batch: Batch) -> Tensor:
        """Attention of [T, H, nope] and [T, H, rope]: [T, H * v_head_dim], zeros for padding."""
        scale, one = self.attention.config.softmax_scale, batch.decodes
        out = q_nope.new_zeros(len(q_nope), self.w_uv.shape[0], self.w_uv.shape[1]).flatten(1)
        if one:
            query = torch.cat((absorb(q_nope[:one].unsqueeze(1), self.w_uk).squeeze(1), q_rope[:one]), dim=-1)
            table, seq_lens = batch.block_table[:one], batch.seq_lens[:one]
            summed = paged_mla_decode(query, cache, table, seq_lens, scale, self.w_uv.shape[-1])
            out[:one] = value_rows(summed, self.w_uv)
        for sequence, length in enumerate(batch.lengths, start=one):
            rows = slice(batch.query_start[sequence], batch.query_start[sequence + 1])
            if rows.stop > rows.start:
                slots = gather_pages(cache, batch.block_table[sequence : sequence + 1], length).to(q_nope.dtype)
                out[rows] = self._sequence(q_nope[rows].unsqueeze(0), q_rope[rows].unsqueeze(0), slots, length)
        return out

    def _sequence(self, q_nope: Tensor, q_rope: Tensor, slots: Tensor, length: int) -> Tensor:
        """The last [1, S, H, ...] of a sequence over its slots [1, length, C]: [S, H * v_head_dim]."""
        config, new = self.attention.config, q_nope.shape[1]
        positions = torch.arange(length - new, length, device=slots.device).unsqueeze(0)
        if absorbed_is_cheaper(config, new, length):
            q_latent = absorb(q_nope, self.w_uk)
            summed = mla_absorbed_attention(q_latent, q_rope, slots, positions, config.softmax_scale)
            return value_heads(summed, self.w_uv).flatten(2).squeeze(0)
        kv_b = torch.cat((self.w_uk, self.w_uv), dim=1)
        values = mla_naive_attention(q_nope, q_rope, slots, kv_b, positions, config.softmax_scale, whole=True)
        return values.flatten(2).squeeze(0)
