"""Multi-head latent attention of one rank over the line's pages.

A token's 576 cached values are one head of 288 in the K pages and 288 in the V pages, each held once: half of the
latents, and behind them half of the rotated key, as `decode_layer` reads them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kimi_k2.config import KimiK2Config
from kimi_k2.neuron.torch_native.kernels import Kernels
from kimi_k2.neuron.torch_native.settings import Ranks
from kimi_k2.ops.embedding import apply_rotary_interleaved
from kimi_k2.ops.linear import rms_norm as rms_norm_operation
from kimi_k2.plan.torch_native import KEYS
from kimi_k2.quantization.neuron_e4m3 import NEURON_E4M3_MAX
from kimi_k2.sharding import attention_tiles

Up = tuple[Tensor, Tensor]  # W_UK and W_UV, [heads, n, rank]; or latents and rotated keys

# The plain functions: a table of implementations has no place inside a graph.
rms_norm = rms_norm_operation.__wrapped__  # type: ignore[attr-defined]
rotate = apply_rotary_interleaved.__wrapped__  # type: ignore[attr-defined]


def halves_of(latents: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """What K's and V's pages hold of latents [.., rank] and rotated keys [.., rope]."""
    first, second = (torch.cat(half, dim=-1) for half in zip(latents.chunk(2, -1), keys.chunk(2, -1), strict=True))
    return first, second


def entries_of(halves: tuple[Tensor, Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """Latents and rotated keys of what `halves_of` gave."""
    latents, keys = (
        torch.cat(parts, dim=-1) for parts in zip(*(h.tensor_split([rank // 2], -1) for h in halves), strict=True)
    )
    return latents, keys


class Pages:
    """One layer's pages, seen as rows of slots; of FP8 values at scale 1 they hold what is within 240.

    What is written is read from what `write` returns, never from the pages before: the compiler makes a write a new
    value, and a reader of the old one, or of a view of it, keeps what was there before. The write itself is of the
    pages as the runner bound them, through no view, so that it can be in place.

    Args:
        k: [blocks, 1, block, D] (or [blocks, block, 1, D]), D half of a cached entry.
        v: of the same shape.
        kernels: that may run.
    """

    def __init__(self, k: Tensor, v: Tensor, kernels: Kernels) -> None:
        self.halves, self.kernels = (k, v), kernels

    def write(self, entries: Tensor, slots: Tensor) -> Pages:
        """These pages with [T, 2 D] at int64 [T] slots; padding, slot 0 (the null block's) or -1, changes nothing."""
        k, v = self.halves
        if k.dtype != entries.dtype:  # FP8
            entries = entries.clamp(-NEURON_E4M3_MAX, NEURON_E4M3_MAX).to(k.dtype)
        made = self.kernels.write(self.halves, entries, slots)
        if made is not None:
            return Pages(*made, self.kernels)
        size = k.shape[1] * k.shape[2]
        at, kept = slots.clamp(min=0), (slots > 0).unsqueeze(-1)
        inside = torch.remainder(at, size)
        zero = torch.zeros_like(at)
        place = (at // size, zero, inside) if k.shape[1] == 1 else (at // size, inside, zero)
        first, second = entries.chunk(2, dim=-1)
        return Pages(_put(k, place, first, kept), _put(v, place, second, kept), self.kernels)

    def read(self, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Both halves of int32 [B, M] blocks (negative or 0: none), each [B, M * block, D]."""
        at = blocks.clamp(min=0).to(torch.long)
        k, v = (half.flatten(1)[at].view(len(at), -1, half.shape[-1]).to(dtype) for half in self.halves)
        return k, v


def _put(half: Tensor, place: tuple[Tensor, ...], new: Tensor, kept: Tensor) -> Tensor:
    return half.index_put_(place, torch.where(kept, new, half[place]))


class Attention:
    """The attention half of a layer, before the sum over ranks.

    Args:
        config: of the model.
        weights: the layer's `self_attn`.
        ranks: which this is.
    """

    def __init__(self, config: KimiK2Config, weights: nn.Module, ranks: Ranks) -> None:
        self.config, self.weights, self.ranks = config, weights, ranks
        self.tiles = "tiles" in dict(weights.named_children())
        self.pages: Pages | None = None

    def _of(self, name: str) -> Tensor:
        return self.weights.get_parameter(f"{name}.weight")

    def down(self, x: Tensor) -> Tensor:
        """q_a and kv_a of normed [T, H]: [T, N]."""
        made: Tensor = self.ranks.tp.all_gather(linear(x, self._of("qkv_a_proj")), -1)
        return made

    def __call__(self, x: Tensor, positions: Tensor, rotation: tuple[Tensor, Tensor], metadata: Any) -> Tensor:
        """Normed [T, H] of all this batch's tokens to this rank's part of [T, H].

        Args:
            x: hidden states behind the norm.
            positions: int64 [T]; those of padding are ignored.
            rotation: cos and sin at these positions, each [T, rope / 2].
            metadata: the line's, of this layer.
        """
        config, eps = self.config, self.config.latent_norm_eps
        rank, nope, rope = config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim
        heads = config.num_attention_heads // int(self.ranks.tp.world_size)
        q_a, latent, k_rope = self.down(x).split([config.q_lora_rank, rank, rope], dim=-1)
        normed = rms_norm(q_a, self._of("q_a_layernorm"), eps)
        if self.tiles:
            q_nope, q_rope = attention_tiles.queries(normed, self._of("tiles.q_b"), heads)
            up = attention_tiles.up_projections(self._of("tiles.w_uk"), self._of("tiles.w_uv"))
        else:
            q_nope, q_rope = linear(normed, self._of("q_b_proj")).unflatten(-1, (heads, -1)).split([nope, rope], dim=-1)
            up = self._of("kv_b_proj").view(heads, -1, rank).split([nope, config.v_head_dim], dim=1)
        cos, sin = rotation
        q_rope = rotate(q_rope, cos.unsqueeze(1), sin.unsqueeze(1))
        entries = rms_norm(latent, self._of("kv_a_layernorm"), eps), rotate(k_rope, cos, sin)
        assert self.pages is not None, "bind_kv_cache comes first"
        pages = self.pages.write(torch.cat(halves_of(*entries), dim=-1), metadata["slot_mapping"])
        if metadata["max_query_len"] <= metadata["decode_token_threshold"]:
            out = self._absorbed(q_nope, q_rope, up, positions, metadata["block_table_tensor"], pages)
        else:
            out = self._expanded(q_nope, q_rope, up, positions, self._keys(entries, metadata, pages))
        if self.tiles:
            return attention_tiles.output(out.flatten(1), self._of("tiles.o"))
        return linear(out.flatten(1), self._of("o_proj"))

    def _absorbed(
        self, q_nope: Tensor, q_rope: Tensor, up: Up, positions: Tensor, table: Tensor, pages: Pages
    ) -> Tensor:
        """Decode: every head of every line's tokens reads the line's latents once. [T, heads, v_head_dim]."""
        w_uk, w_uv = up
        half = w_uv.shape[-1] // 2
        queries = halves_of(torch.einsum("thn,hnr->thr", q_nope, w_uk), q_rope)
        lines, (tokens, heads) = len(table), q_nope.shape[:2]
        k, v = pages.read(table, q_nope.dtype)
        first, second = (query.reshape(lines, -1, query.shape[-1]) for query in queries)
        scores = torch.bmm(first, k.mT).to(torch.float32) + torch.bmm(second, v.mT).to(torch.float32)
        scores = scores.view(tokens, heads, -1) * self.config.softmax_scale
        visible = torch.arange(scores.shape[-1], device=scores.device) <= positions[:, None]
        weights = scores.masked_fill(~visible.unsqueeze(1), float("-inf")).softmax(-1).to(q_nope.dtype)
        weights = weights.view(lines, -1, weights.shape[-1])
        summed = torch.cat((torch.bmm(weights, k[..., :half]), torch.bmm(weights, v[..., :half])), dim=-1)
        return torch.einsum("thr,hvr->thv", summed.reshape(tokens, heads, -1), w_uv)

    def _keys(self, entries: Up, metadata: Any, pages: Pages) -> Iterator[Up]:
        """Latents and keys that a prompt's tokens may see, some at a time, from position 0 on.

        A whole prompt sees its own; a segment what the pages hold, its own tokens included.
        """
        segment = int(metadata["kv_segment_size"])
        if not segment:
            yield from zip(*(entry.split(KEYS) for entry in entries), strict=True)
            return
        table = metadata["block_table_tensor"]
        for blocks in table.split(max(1, segment // int(metadata["block_size"])), dim=1):
            latents, keys = entries_of(pages.read(blocks, entries[0].dtype), self.config.kv_lora_rank)
            yield latents[0], keys[0]

    def _expanded(self, q_nope: Tensor, q_rope: Tensor, up: Up, positions: Tensor, keys: Iterator[Up]) -> Tensor:
        """Prefill of one request: keys and values expanded part by part, [T, heads, v_head_dim].

        The softmax runs along in float32 (Milakov and Gimelshein 2018, arXiv 1805.02867).
        """
        config = self.config
        query = torch.cat((q_nope, q_rope), dim=-1).transpose(0, 1)  # [heads, T, nope + rope]
        kv_b = torch.cat(up, dim=1)
        tokens, heads, start = len(positions), len(kv_b), 0
        total = torch.zeros(heads, tokens, config.v_head_dim, dtype=torch.float32, device=query.device)
        weight = torch.zeros(heads, tokens, 1, dtype=torch.float32, device=query.device)
        largest = torch.full_like(weight, torch.finfo(torch.float32).min)
        for latent, k_rope in keys:
            expanded = torch.matmul(latent, kv_b.mT)  # [heads, S, nope + v]
            k_nope, values = expanded.split([config.qk_nope_head_dim, config.v_head_dim], dim=-1)
            key = torch.cat((k_nope, k_rope.expand(heads, -1, -1)), dim=-1)
            scores = torch.bmm(query, key.mT).to(torch.float32) * config.softmax_scale
            visible = start + torch.arange(len(latent), device=query.device) <= positions[:, None]
            scores = scores.masked_fill(~visible, float("-inf"))
            start += len(latent)
            now = torch.maximum(largest, scores.amax(-1, keepdim=True))
            share, kept = (scores - now).exp(), (largest - now).exp()
            total = total * kept + torch.bmm(share.to(values.dtype), values).to(torch.float32)
            weight, largest = weight * kept + share.sum(-1, keepdim=True), now
        return (total / weight).transpose(0, 1).to(q_nope.dtype)
