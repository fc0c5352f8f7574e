"""One layer of a step: the model's weights and operations, arranged for few launches, over a cache in pages.

Norms and residual sums go with the linears after them, q_a and kv_a are one linear, the router goes with the norm
before it and the shared expert with the routed ones. Which kernels run is the table's affair (`ops.registry`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from kimi_k2.engine.batch import Batch, Chunk, RaggedChunk
from kimi_k2.engine.spread import Gathered
from kimi_k2.model.attention import MultiHeadLatentAttention
from kimi_k2.model.decoder import DecoderLayer, HiddenStates
from kimi_k2.model.linear import Linear
from kimi_k2.model.moe import MLP, MoE
from kimi_k2.ops.experts import add_norm_route, routed_experts, routed_experts_with_shared, swiglu
from kimi_k2.ops.linear import Weight, add_norm, add_project, project
from kimi_k2.ops.mla import (
    attend_values,
    gather_pages,
    mla_decode,
    mla_ragged_attention,
    query_and_entry,
    rotate_and_store,
    to_cache,
    value_rows,
)


def stack_rows(first: Linear, second: Linear, dtype: torch.dtype) -> Weight:
    """The rows of `first`, then those of `second`, as stored: both become views of it, so that nothing is held twice.

    Where a scale's block would straddle the two, or they are stored differently, it is a dequantized copy in `dtype`.
    """
    upper, lower = first.stored(), second.stored()
    quantization = upper.quantization
    if quantization != lower.quantization or not _ends_with_a_block(upper, first.rows):
        return Weight({"weight": torch.cat((first.dequantized(dtype), second.dequantized(dtype)))})
    both: dict[str, Tensor] = {}
    for suffix, top in upper.tensors.items():
        both[suffix] = _join(top, lower.tensors[suffix])
    first.hold({suffix: tensor[: len(upper.tensors[suffix])] for suffix, tensor in both.items()})
    second.hold({suffix: tensor[len(upper.tensors[suffix]) :] for suffix, tensor in both.items()})
    return Weight(both, quantization)


def _ends_with_a_block(weight: Weight, rows: int) -> bool:
    """Whether other rows can follow: each tensor has an entry a row, or one for each whole block of rows."""
    quantization = weight.quantization
    if quantization is None:
        return True
    counts = [len(tensor) if tensor.dim() else 0 for tensor in weight.tensors.values()]
    return rows % quantization.block[0] == 0 and set(counts) <= {rows, rows // quantization.block[0]}


def _join(top: Tensor, bottom: Tensor) -> Tensor:
    """The two, one below the other; the tensor that they are views of, if they are views of one already."""
    shared = top.untyped_storage().data_ptr() == bottom.untyped_storage().data_ptr()
    if shared and bottom.storage_offset() == top.storage_offset() + top.numel():
        return top.as_strided((len(top) + len(bottom), *top.shape[1:]), top.stride())
    if top.dtype == torch.float8_e4m3fn:  # PyTorch concatenates no FP8
        return torch.cat((top.view(torch.uint8), bottom.view(torch.uint8))).view(top.dtype)
    return torch.cat((top, bottom))


Reduce = Callable[[Tensor], Tensor]
Routing = tuple[Tensor, Tensor]
# Of experts chosen, numbers of the model's, the numbers by which ranks hold them.
Place = Callable[[Tensor], Tensor]


def alone(x: Tensor) -> Tensor:
    """`reduce` and `gather` of one rank."""
    return x


class Exchange(Protocol):
    """Tokens of replicas that share routed experts; every replica makes the same calls."""

    def gather(self, tensors: list[Tensor]) -> list[Tensor]:
        """Of each tensor [T, n] all replicas' rows."""
        ...

    def scatter(self, rows: Tensor) -> Tensor:
        """This replica's rows of the sum of all replicas' rows."""
        ...


class LayerStep:
    """One layer for the new tokens of a batch.

    Args:
        layer: of the plain model, whole or a rank's part, prepared (`KimiK2ForCausalLM.prepare`).
        reduce: sum over ranks after each half.
        exchange: of tokens among replicas; None without.
        place: where experts are held, if not by their own numbers.
    """

    def __init__(
        self, layer: DecoderLayer, reduce: Reduce, exchange: Exchange | None = None, place: Place | None = None
    ) -> None:
        self.layer, self.attention, self.reduce = layer, layer.self_attn, reduce
        self.exchange, self.place = exchange, place
        attention, config = self.attention, layer.self_attn.config
        assert isinstance(attention, MultiHeadLatentAttention)
        dtype = layer.input_layernorm.weight.dtype
        self.qkv_a = stack_rows(attention.q_a_proj, attention.kv_a_proj_with_mqa, dtype)
        self.q_b, self.o = attention.q_b_proj.stored(), attention.o_proj.stored()
        self.softmax_scale = config.softmax_scale
        w_uk, w_uv = attention.kv_b(dtype).split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        self.w_uk, self.w_uv = w_uk.contiguous(), w_uv.contiguous()
        self.moe = layer.mlp if isinstance(layer.mlp, MoE) else None
        self.experts = None if self.moe is None else self.moe.experts.stored()
        dense = layer.mlp if self.moe is None else self.moe.shared_experts
        self.dense = None
        if isinstance(dense, MLP):
            self.dense = stack_rows(dense.gate_proj, dense.up_proj, dtype), dense.down_proj.stored()

    @property
    def width(self) -> int:
        """Values of a token, H * v_head_dim."""
        heads, value = self.w_uv.shape[:2]
        return int(heads * value)

    def renew(self) -> None:
        """After the layer has taken other weights: what is computed from them, anew at the same addresses.

        CUDA graphs that hold this step may be replayed then.
        """
        fresh = LayerStep(self.layer, self.reduce)
        for current, renewed in zip(self._computed(), fresh._computed(), strict=True):
            if current.data_ptr() != renewed.data_ptr():
                current[: len(renewed)].copy_(renewed)  # behind them may be heads of zeros
        self.experts = fresh.experts

    def _computed(self) -> list[Tensor]:
        """What may be a copy of the layer's own tensors."""
        stacked = [self.qkv_a, *(() if self.dense is None else self.dense[:1])]
        return [self.w_uk, self.w_uv, *(tensor for weight in stacked for tensor in weight.tensors.values())]

    def __call__(
        self, x: Tensor, delta: Tensor | None, batch: Batch | None, cache: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The layer for the new tokens.

        Args:
            x: [T, H], the residual.
            delta: [T, H], what is yet to be added to it, None for nothing.
            batch: None while an engine measures memory, before there is a cache: attention is left out.
            cache: the layer's, [N, P, cache_dim].

        Returns:
            x and delta for the next layer.
        """
        attended, x = self.attention_half(x, delta, batch, cache)
        return self.finish(x, attended)

    def attention_half(
        self, x: Tensor, delta: Tensor | None, batch: Batch | None, cache: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """The attention half before the sum over ranks [T, H], and the residual x + delta."""
        qkv_a, x = self.enter(x, delta)
        if batch is None or cache is None:
            return self.output(x.new_zeros(len(x), self.width)), x
        q = self.queries(qkv_a) if batch.chunks else None
        return self.output(self.attend(qkv_a, q, batch, cache)), x

    def enter(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """Outputs of q_a and kv_a [T, q_lora_rank + cache_dim], and the residual x + delta."""
        norm = self.layer.input_layernorm
        return add_project(x, delta, self.qkv_a, norm.weight, norm.eps)

    def queries(self, qkv_a: Tensor) -> Tensor:
        """Of outputs of q_a and kv_a: [T, H * qk_head_dim], not rotated."""
        norm = self.attention.q_a_layernorm
        return project(qkv_a[:, : len(norm.weight)], self.q_b, norm.weight, norm.eps)

    def output(self, values: Tensor) -> Tensor:
        """Of the attention's values [T, H * v_head_dim] what the layer adds, before the sum over ranks [T, H]."""
        return project(values, self.o)

    def attend(self, qkv_a: Tensor, q: Tensor | None, batch: Batch, cache: Tensor, out: Tensor | None = None) -> Tensor:
        """Store a batch's new tokens and make their values.

        Args:
            qkv_a: of `enter`.
            q: of `queries`, where the batch has chunks; written.
            out: [T or more, H * v_head_dim]: takes the values; padding behind them stays as it is.

        Returns:
            [T, H * v_head_dim], zeros for padding; or `out`.
        """
        number = self.attention.layer
        if batch.before_attention is not None:
            batch.before_attention(number)
        decoding = qkv_a if batch.decodes == len(qkv_a) else qkv_a[: batch.decodes]
        values = [self._decode(decoding, batch, cache)] if batch.decodes else []
        if q is not None:
            values += self._chunks(qkv_a, q, batch, cache)
        if batch.after_attention is not None:
            batch.after_attention(number)
        if out is not None:
            if values:
                torch.cat(values, out=out[: batch.tokens])
            return out
        if batch.tokens < len(qkv_a) or not values:
            values.append(qkv_a.new_zeros(len(qkv_a) - batch.tokens, self.width))
        return values[0] if len(values) == 1 else torch.cat(values)

    def _decode(self, qkv_a: Tensor, batch: Batch, cache: Tensor) -> Tensor:
        """Values [B, H * v_head_dim] of the sequences with one new token, which is stored."""
        query, (_, _, _, seq_lens, table) = self.query(qkv_a, batch, cache), batch.single
        if batch.spread is None:
            return attend_values(query, cache, seq_lens, self.w_uv, self.softmax_scale, batch.plan(), table)
        query = batch.spread.queries(query)
        lse = query.new_empty(query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32))
        rank = self.attention.config.kv_lora_rank
        summed = mla_decode(query, cache, seq_lens, self.softmax_scale, rank, batch.plan(), table, lse)
        return value_rows(batch.spread.join(summed, lse), self.w_uv)

    def query(self, qkv_a: Tensor, batch: Batch, cache: Tensor) -> Tensor:
        """Absorbed queries [B, H, cache_dim] of sequences with one new token, which is stored."""
        attention, (cos, sin, slots, _, _) = self.attention, batch.single
        q_norm, kv_norm = attention.q_a_layernorm, attention.kv_a_layernorm
        return query_and_entry(
            qkv_a, q_norm.weight, self.q_b, kv_norm.weight, cos, sin, slots, self.w_uk, cache, q_norm.eps, kv_norm.eps
        )

    def _chunks(self, qkv_a: Tensor, q: Tensor, batch: Batch, cache: Tensor) -> list[Tensor]:
        """Values of each chunk; all new tokens are stored first."""
        rest, config, norm = slice(batch.decodes, batch.tokens), self.attention.config, self.attention.kv_a_layernorm
        q, kv_a = q[rest].unflatten(1, (-1, config.qk_head_dim)), qkv_a[rest, config.q_lora_rank :]
        cos, sin, slots = (each[rest] for each in (*batch.rotation, batch.slots))
        q, entries = rotate_and_store(q, kv_a, norm.weight, cos, sin, slots, cache, norm.eps)
        sizes = [chunk.rows.stop - chunk.rows.start for chunk in batch.chunks]
        parts = zip(q.split(sizes), entries.split(sizes), batch.chunks, strict=True)
        return [self._chunk(*part, batch, cache) for part in parts]

    def _chunk(self, q: Tensor, entries: Tensor, chunk: Chunk | RaggedChunk, batch: Batch, cache: Tensor) -> Tensor:
        """Values [rows, H * v_head_dim] of a chunk, whose entries are stored."""
        config, dtype = self.attention.config, q.dtype
        widths = [config.qk_nope_head_dim, config.qk_rope_head_dim]
        kv_b = self.attention.kv_b(dtype)
        if len(kv_b) != len(self.w_uk):  # heads of zeros
            kv_b = torch.cat((self.w_uk, self.w_uv), dim=1)
        if isinstance(chunk, RaggedChunk):
            if chunk.places is None:
                slots = to_cache(entries, cache.dtype)
            elif isinstance(chunk.places, Gathered):
                assert batch.spread is not None
                slots = batch.spread.slots(cache, entries, chunk.places)
            else:
                slots = cache[chunk.places]
            queries = q.split(widths, dim=-1)
            inputs = *queries, slots.to(dtype), kv_b, chunk.queries, chunk.keys, self.softmax_scale
            return mla_ragged_attention(*inputs).flatten(1)
        sequences, new = chunk.positions.shape
        if chunk.whole and new == chunk.length:  # the cache is what has just been stored
            slots = to_cache(entries, cache.dtype).unflatten(0, (sequences, new))
        elif batch.block_table is None:
            slots = cache[chunk.sequences, : chunk.length]
        else:
            slots = gather_pages(cache, batch.block_table[chunk.sequences], chunk.length)
        q_nope, q_rope = q.unflatten(0, (sequences, new)).split(widths, dim=-1)
        values = self.attention.over(q_nope, q_rope, slots.to(dtype), kv_b, chunk.positions)
        return values.flatten(2).flatten(0, 1)

    def leave(self, x: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Behind attention, whose values are [T, H * v_head_dim]: as a call returns."""
        return self.finish(x, self.output(values))

    def finish(self, x: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """The layer behind its attention half."""
        delta, norm, moe = self.reduce(attended), self.layer.post_attention_layernorm, self.moe
        if moe is None:
            x, normed = add_norm(x, delta, norm.weight, norm.eps)
            return x, self.reduce(self.feed_forward(normed))
        gate = moe.gate
        x, normed, *routing = add_norm_route(
            x, delta, norm.weight, norm.eps, gate.weight, gate.e_score_correction_bias, gate.top_k, **gate.options
        )
        return x, self.reduce(self.feed_forward(normed, (routing[0], routing[1])))

    def feed_forward(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        """The other half from its normed input [B, H] and, if it is known, its routing; before the sum over ranks."""
        if self.moe is None or self.experts is None:
            assert self.dense is not None
            return swiglu(x, *self.dense)
        indices, weights = routing or self.moe.gate(x)
        if self.place is not None:
            indices = self.place(indices)
        if self.dense is None:
            return self.routed_sum(x, indices, weights)
        if self.exchange is not None:
            return self.routed_sum(x, indices, weights) + swiglu(x, *self.dense)
        return routed_experts_with_shared(x, self.experts, indices, weights, *self.dense)

    def routed_sum(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        """The routed experts' part of `feed_forward` [B, H]; replicas' tokens are exchanged for it."""
        assert self.experts is not None
        if self.exchange is None:
            return routed_experts(x, self.experts, indices, weights)
        gathered = self.exchange.gather([x, indices, weights])
        return self.exchange.scatter(routed_experts(gathered[0], self.experts, *gathered[1:]))


def through(
    layers: Sequence[LayerStep],
    x: Tensor,
    batch: Batch | None,
    caches: Iterable[Tensor | None],
    states: HiddenStates | None = None,
    delta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Embedded new tokens [T, H] through all layers, each with its cache: the last residual and its delta [T, H].

    `states` sees the stream before each layer and behind the last. What layers before these have made is x + `delta`.
    """
    for number, (layer, cache) in enumerate(zip(layers, caches, strict=True)):
        if states is not None:
            states.pass_by(number, x, delta)
        x, delta = layer(x, delta, batch, cache)
    assert delta is not None
    if states is not None:
        states.pass_by(len(layers), x, delta)
    return x, delta
