"""One layer of a decode or prompt step: the model's weights and operations, arranged for few launches.

Norms and residual sums go with the linears after them, q_a and kv_a are one linear, the router goes with the norm
before it and the shared expert with the routed ones. Which kernels run is the table's affair (`ops.registry`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from kimi_k2.engine.stacking import stack_rows
from kimi_k2.model.attention import MultiHeadLatentAttention
from kimi_k2.model.cache import LatentCache
from kimi_k2.model.decoder import DecoderLayer
from kimi_k2.model.moe import MLP, MoE
from kimi_k2.ops.experts import routed_experts, routed_experts_with_shared, swiglu
from kimi_k2.ops.linear import add_project, project
from kimi_k2.ops.mla_decode import attend_values, query_and_entry
from kimi_k2.ops.norm import add_norm
from kimi_k2.ops.router import add_norm_route

Reduce = Callable[[Tensor], Tensor]
Routing = tuple[Tensor, Tensor]


class Place(NamedTuple):
    """Where the new tokens stand, the same for all layers.

    Attributes:
        positions: int64 [B].
        seq_lens: int32 [B], positions + 1.
        cos, sin: [B, D / 2].
        plan: of `attention_plan` for seq_lens; None for none.
        slots: int64 [B], of the new tokens, as `query_and_entry` takes them.
        block_table: of a cache in pages, as `mla_decode` takes it.
    """

    positions: Tensor
    seq_lens: Tensor
    cos: Tensor
    sin: Tensor
    plan: Tensor | None
    slots: Tensor
    block_table: Tensor | None = None


class Prompt(NamedTuple):
    """Where a chunk of prompts stands.

    Attributes:
        positions: int64 [B, S], negative for padding.
        rotation: cos and sin at these, each [B, S, D / 2].
        cache: of all layers.
        length: cache slots to attend over.
        whole: the chunk's tokens are those of the last S slots, none of them padding.
    """

    positions: Tensor
    rotation: tuple[Tensor, Tensor]
    cache: LatentCache
    length: int
    whole: bool = False


class LayerStep:
    """One layer for one new token a sequence, or for a chunk of each prompt.

    Args:
        layer: of the plain model, whole or a rank's part, prepared (`KimiK2ForCausalLM.prepare`).
        reduce: sum over ranks after each half.
    """

    def __init__(self, layer: DecoderLayer, reduce: Reduce) -> None:
        self.layer, self.attention, self.reduce = layer, layer.self_attn, reduce
        attention, config = self.attention, layer.self_attn.config
        assert isinstance(attention, MultiHeadLatentAttention)
        dtype = layer.input_layernorm.weight.dtype
        self.qkv_a = stack_rows(attention.q_a_proj, attention.kv_a_proj_with_mqa, dtype)
        self.q_b, self.o = attention.q_b_proj.stored(), attention.o_proj.stored()
        w_uk, w_uv = attention.kv_b(dtype).split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        self.w_uk, self.w_uv = w_uk.contiguous(), w_uv.contiguous()
        self.moe = layer.mlp if isinstance(layer.mlp, MoE) else None
        self.experts = None if self.moe is None else self.moe.experts.stored()
        dense = layer.mlp if self.moe is None else self.moe.shared_experts
        self.dense = None
        if isinstance(dense, MLP):
            self.dense = stack_rows(dense.gate_proj, dense.up_proj, dtype), dense.down_proj.stored()

    def renew(self) -> None:
        """After the layer has taken other weights: what is computed from them, anew at the same addresses.

        CUDA graphs that hold this step may be replayed then.
        """
        fresh = LayerStep(self.layer, self.reduce)
        for held, made in zip(self._computed(), fresh._computed(), strict=True):
            if held.data_ptr() != made.data_ptr():
                held[: len(made)].copy_(made)  # behind them may be heads of zeros
        self.experts = fresh.experts

    def _computed(self) -> list[Tensor]:
        """What may be a copy of the layer's own tensors."""
        stacked = [self.qkv_a, *(() if self.dense is None else self.dense[:1])]
        return [self.w_uk, self.w_uv, *(tensor for weight in stacked for tensor in weight.tensors.values())]

    def __call__(self, x: Tensor, delta: Tensor | None, place: Place, cache: Tensor) -> tuple[Tensor, Tensor]:
        """The residual x [B, H] and what is yet to be added to it, None for nothing; the layer's part of the cache.

        Returns:
            The same two for the next layer.
        """
        attended, x = self.attend(x, delta, place, cache)
        return self.finish(x, attended)

    def read(self, x: Tensor, delta: Tensor | None, prompt: Prompt) -> tuple[Tensor, Tensor]:
        """As a call, for a chunk of each prompt: x and delta are [B * S, H]."""
        attended, x = self.attend_prompt(x, delta, prompt)
        return self.finish(x, attended)

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

    def attend(self, x: Tensor, delta: Tensor | None, place: Place, cache: Tensor) -> tuple[Tensor, Tensor]:
        """The attention half before the sum over ranks [B, H], and the residual x + delta."""
        attention, norm = self.attention, self.layer.input_layernorm
        q_norm, kv_norm = attention.q_a_layernorm, attention.kv_a_layernorm
        qkv_a, x = add_project(x, delta, self.qkv_a, norm.weight, norm.eps)
        given = qkv_a, q_norm.weight, self.q_b, kv_norm.weight, place.cos, place.sin
        behind, scale = (self.w_uk, cache, q_norm.eps, kv_norm.eps), attention.config.softmax_scale
        query = query_and_entry(*given, place.slots, *behind)
        values = attend_values(query, cache, place.seq_lens, self.w_uv, scale, place.plan, place.block_table)
        return project(values, self.o), x

    def attend_prompt(self, x: Tensor, delta: Tensor | None, prompt: Prompt) -> tuple[Tensor, Tensor]:
        """`attend` for a chunk of each prompt, [B * S, H]."""
        attention, norm, config = self.attention, self.layer.input_layernorm, self.attention.config
        qkv_a, x = add_project(x, delta, self.qkv_a, norm.weight, norm.eps)
        q_norm = attention.q_a_layernorm
        q_a, latent, k_rope = qkv_a.split([config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        q = project(q_a, self.q_b, q_norm.weight, q_norm.eps)
        q, latent, k_rope = (part.unflatten(0, prompt.positions.shape) for part in (q, latent, k_rope))
        values = attention.attend(q, latent, k_rope, *prompt, own_queries=True)
        return project(values.flatten(0, 1), self.o), x

    def feed_forward(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        """The other half from its normed input [B, H] and, if it is known, its routing; before the sum over ranks."""
        if self.moe is None or self.experts is None:
            assert self.dense is not None
            return swiglu(x, *self.dense)
        indices, weights = routing or self.moe.gate(x)
        if self.dense is None:
            return routed_experts(x, self.experts, indices, weights)
        gate_up, down = self.dense
        return routed_experts_with_shared(x, self.experts, indices, weights, gate_up, down)
