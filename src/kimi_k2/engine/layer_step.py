"""One layer of a decode step, without host synchronisation, so that a CUDA graph can hold it.

The same modules, weights and operations as `model`, arranged for few tokens: norms and residual sums inside the
products, q_a and kv_a in one, the shared expert as one more of the routed ones or beside them on a second stream. Works
on a CPU too, where it is tested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kimi_k2.kernels.attention import attend_values, value_rows
from kimi_k2.kernels.attention import query as query_kernel
from kimi_k2.kernels.attention.mla_decode import mla_decode
from kimi_k2.kernels.attention.mla_decode import supports as supports_mla
from kimi_k2.kernels.experts import fp8_decode as moe_decode
from kimi_k2.kernels.linear.fused_linear import (
    fused_add_linear,
    fused_linear,
    supports_bf16_linear,
    supports_fp8_linear,
)
from kimi_k2.kernels.router import norm_route
from kimi_k2.kernels.rowwise.decode import absorb_and_store, add_norm, supports, supports_sum
from kimi_k2.model.attention import MultiHeadLatentAttention, mla_absorbed_attention
from kimi_k2.model.cache import to_cache
from kimi_k2.model.decoder import DecoderLayer
from kimi_k2.model.linear import Linear
from kimi_k2.model.moe import MLP, MoE, routed_experts
from kimi_k2.model.norm import RMSNorm
from kimi_k2.model.rope import apply_rotary_interleaved
from kimi_k2.ops import registry

Reduce = Callable[[Tensor], Tensor]
Routing = tuple[Tensor, Tensor]


class Place(NamedTuple):
    """Where the new tokens stand: positions int64 [B], seq_lens int32 [B] = positions + 1, cos and sin [B, D / 2]."""

    positions: Tensor
    seq_lens: Tensor
    cos: Tensor
    sin: Tensor


def takes(x: Tensor, linear: Linear) -> bool:
    """Whether a kernel for few tokens takes x [B, K] times this weight, FP8 or BF16."""
    if not linear.quantized:
        return supports_bf16_linear(x, linear.weight)
    return "weight_scale_inv" in linear.suffixes and supports_fp8_linear(
        x, linear.weight, linear.weight_scale_inv, (128, 128)
    )


def project(x: Tensor, linear: Linear, norm: RMSNorm | None = None) -> Tensor:
    """linear(norm(x)) for x [B, K], in one launch where the kernel takes it."""
    if takes(x, linear):
        scale = linear.weight_scale_inv if linear.quantized else None
        return fused_linear(x, linear.weight, scale, *((None, 1e-6) if norm is None else (norm.weight, norm.eps)))
    return linear(x if norm is None else norm(x))


def add_project(x: Tensor, delta: Tensor | None, linear: Linear, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """linear(norm(x + delta)) and x + delta, in one launch where the kernel takes it; None is no delta."""
    if delta is None:
        return project(x, linear, norm), x
    if takes(x, linear):
        scale = linear.weight_scale_inv if linear.quantized else None
        return fused_add_linear(x, delta, linear.weight, scale, norm.weight, norm.eps)
    return project(x + delta, linear, norm), x + delta


def normed_sum(x: Tensor, delta: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """x + delta and its norm."""
    if supports_sum(x):
        return add_norm(x, delta, norm.weight, norm.eps)
    total = x + delta
    return total, norm(total)


def stack_rows(first: Linear, second: Linear) -> Linear | None:
    """The two as one Linear whose output is theirs side by side; None if a scale block would straddle them.

    `first` and `second` become views of it, so that nothing is held twice.
    """
    fp8 = first.quantized and first.weight.dtype == torch.float8_e4m3fn
    if first.quantized != second.quantized or (first.quantized and not fp8):
        return None
    rows = first.weight.shape[0]
    if fp8 and rows % 128:
        return None
    both = Linear.__new__(Linear)
    nn.Module.__init__(both)
    both.quantization, both.suffixes, both.quantized = first.quantization, first.suffixes, first.quantized
    if not fp8:
        both.weight = nn.Parameter(torch.cat((first.weight, second.weight)), requires_grad=False)
        for part, slice_ in ((first, slice(None, rows)), (second, slice(rows, None))):
            part.weight = nn.Parameter(both.weight[slice_], requires_grad=False)
        return both
    both.weight = torch.cat((first.weight.view(torch.uint8), second.weight.view(torch.uint8))).view(first.weight.dtype)
    both.weight_scale_inv = torch.cat((first.weight_scale_inv, second.weight_scale_inv))
    first.weight, second.weight = both.weight[:rows], both.weight[rows:]
    blocks = rows // 128
    first.weight_scale_inv, second.weight_scale_inv = both.weight_scale_inv[:blocks], both.weight_scale_inv[blocks:]
    return both


class LayerStep:
    """One layer for one new token a sequence.

    Args:
        layer: of the plain model, whole or a rank's part.
        reduce: sum over ranks after each half.
    """

    def __init__(self, layer: DecoderLayer, reduce: Reduce) -> None:
        self.layer, self.attention, self.reduce = layer, layer.self_attn, reduce
        assert isinstance(self.attention, MultiHeadLatentAttention)
        self.qkv_a = stack_rows(self.attention.q_a_proj, self.attention.kv_a_proj_with_mqa)
        mlp = layer.mlp.shared_experts if isinstance(layer.mlp, MoE) else layer.mlp
        self.dense = mlp if isinstance(mlp, MLP) else None
        self.gate_up = None if self.dense is None else stack_rows(self.dense.gate_proj, self.dense.up_proj)
        self.shared: tuple[Tensor, ...] | None = None
        if self.dense is not None and self.gate_up is not None and self.gate_up.quantized:
            down = self.dense.down_proj
            self.shared = (self.gate_up.weight, self.gate_up.weight_scale_inv, down.weight, down.weight_scale_inv)
        config = self.attention.config
        kv_b = self.attention.kv_b_proj.dequantized(layer.input_layernorm.weight.dtype)
        kv_b = kv_b.view(-1, config.qk_nope_head_dim + config.v_head_dim, config.kv_lora_rank)
        w_uk, w_uv = kv_b.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
        self.w_uk, self.w_uv = w_uk.contiguous(), w_uv.contiguous()
        self.side = torch.cuda.Stream() if kv_b.is_cuda else None

    def __call__(self, x: Tensor, delta: Tensor | None, place: Place, cache: Tensor) -> tuple[Tensor, Tensor]:
        """The residual x [B, H] and what is yet to be added to it, None for nothing; cache [B, T, cache_dim].

        Returns:
            The same two for the next layer.
        """
        attended, x = self.attend(x, delta, place, cache)
        x, normed, routing = self.routed_sum(x, self.reduce(attended))
        return x, self.reduce(self.feed_forward(normed, routing))

    def attend(self, x: Tensor, delta: Tensor | None, place: Place, cache: Tensor) -> tuple[Tensor, Tensor]:
        """The attention half before the sum over ranks [B, H], and the residual x + delta."""
        attention, config, norm = self.attention, self.attention.config, self.layer.input_layernorm
        both: Tensor | None = None
        if self.qkv_a is not None:
            both, x = add_project(x, delta, self.qkv_a, norm)
            q_a, kv_a = both.split([config.q_lora_rank, config.cache_dim], dim=-1)
        else:
            q_a, x = add_project(x, delta, attention.q_a_proj, norm)
            kv_a = project(x, attention.kv_a_proj_with_mqa, norm)
        q_b, q_norm, kv_norm = attention.q_b_proj, attention.q_a_layernorm, attention.kv_a_layernorm
        rotation = place.cos, place.sin
        fp8 = q_b.quantized and "weight_scale_inv" in q_b.suffixes
        if both is not None and fp8 and query_kernel.supports(both, q_b.weight, self.w_uk, cache):
            query = query_kernel.query_and_entry(
                both, q_norm.weight, q_b.weight, q_b.weight_scale_inv, kv_norm.weight, *rotation, place.positions,
                self.w_uk, cache, q_norm.eps, kv_norm.eps,
            )  # fmt: skip
        elif supports(x, self.w_uk, cache):
            q = project(q_a.contiguous(), q_b, q_norm)
            query = absorb_and_store(q, kv_a, kv_norm.weight, *rotation, place.positions, self.w_uk, cache, kv_norm.eps)
        else:
            q = project(q_a.contiguous(), q_b, q_norm)
            query = self.queries(q, kv_a, place.positions, rotation, cache)
        if attend_values.supports(query, cache, place.seq_lens, self.w_uv):
            out = attend_values.attend_values(query, cache, place.seq_lens, self.w_uv, config.softmax_scale)
            return project(out, attention.o_proj), x
        if supports_mla(query, cache, place.seq_lens):
            summed = mla_decode(query, cache, place.seq_lens, config.softmax_scale)
        else:
            latent, rope = query.unsqueeze(1).split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
            positions = place.positions[:, None]
            slots = cache.to(query.dtype)
            summed = mla_absorbed_attention(latent, rope, slots, positions, config.softmax_scale).squeeze(1)
        if value_rows.supports(summed, self.w_uv):
            out = value_rows.value_rows(summed, self.w_uv)
        else:
            out = torch.bmm(summed.transpose(0, 1), self.w_uv.mT).transpose(0, 1).flatten(1, 2)
        return project(out, attention.o_proj), x

    def queries(
        self, q: Tensor, kv_a: Tensor, positions: Tensor, rotation: tuple[Tensor, Tensor], cache: Tensor
    ) -> Tensor:
        """`absorb_and_store` in plain operations: [B, heads, cache_dim]."""
        attention, config = self.attention, self.attention.config
        q = q.view(q.shape[0], -1, config.qk_head_dim)
        q_nope, q_rope = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
        latent, k_rope = kv_a.split([config.kv_lora_rank, config.qk_rope_head_dim], dim=-1)
        cos, sin = rotation
        entry = torch.cat((attention.kv_a_layernorm(latent), apply_rotary_interleaved(k_rope, cos, sin)), dim=-1)
        cache[torch.arange(q.shape[0], device=q.device), positions] = to_cache(entry, cache.dtype)
        q_rope = apply_rotary_interleaved(q_rope, cos.unsqueeze(1), sin.unsqueeze(1))
        return torch.cat((torch.bmm(q_nope.transpose(0, 1), self.w_uk).transpose(0, 1), q_rope), dim=-1)

    def routed_sum(self, x: Tensor, delta: Tensor) -> tuple[Tensor, Tensor, Routing | None]:
        """x + delta, its norm, and the norm's routing where one launch makes all three."""
        norm, mlp = self.layer.post_attention_layernorm, self.layer.mlp
        if isinstance(mlp, MoE) and registry.allows("route", "router"):
            gate, config = mlp.gate, self.attention.config
            top_k = config.num_experts_per_tok
            if norm_route.supports(x, gate.weight, top_k, n_group=config.n_group):
                total, normed, *routing = norm_route.add_norm_route(
                    x, delta, norm.weight, norm.eps, gate.weight, gate.e_score_correction_bias, top_k,
                    config.norm_topk_prob, config.routed_scaling_factor,
                )  # fmt: skip
                return total, normed, (routing[0], routing[1])
        return *normed_sum(x, delta, norm), None

    def feed_forward(self, x: Tensor, routing: Routing | None = None) -> Tensor:
        """The other half from its normed input [B, H] and, if it is known, its routing; before the sum over ranks."""
        mlp = self.layer.mlp
        if not isinstance(mlp, MoE):
            return self.swiglu(x)
        if self.dense is None:
            return routed_experts(x, mlp.experts, *(routing or mlp.gate(x)))
        if self.shared is not None and self.joins(x, mlp):
            indices, weights = routing or mlp.gate(x)
            return moe_decode.with_shared(x, mlp.experts, indices, weights, self.shared)
        if self.side is None:
            return self.swiglu(x) + routed_experts(x, mlp.experts, *(routing or mlp.gate(x)))
        # Fork and join become edges of the graph: the shared expert fills what routing leaves idle.
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            shared = self.swiglu(x)
        routed = routed_experts(x, mlp.experts, *(routing or mlp.gate(x)))
        main.wait_stream(self.side)
        return routed + shared

    def joins(self, x: Tensor, mlp: MoE) -> bool:
        """Whether one operation takes the shared expert as one more of the routed ones."""
        experts, top_k = mlp.experts, self.attention.config.num_experts_per_tok
        stored = "down_proj_scale_inv" in experts._buffers and registry.allows("routed_experts", "moe_decode")
        if x.dtype != torch.bfloat16 or not stored:
            return False
        _, hidden, inter = experts.down_proj.shape
        assert self.shared is not None
        same = tuple(self.shared[2].shape) == (hidden, inter)
        return same and moe_decode.supports(x.shape[0], top_k, hidden, inter, x.device)

    def swiglu(self, x: Tensor) -> Tensor:
        """Dense MLP or shared expert, [B, H] to [B, H]."""
        assert self.dense is not None
        if self.gate_up is not None:
            gate, up = project(x, self.gate_up).chunk(2, dim=-1)
        else:
            gate, up = project(x, self.dense.gate_proj), project(x, self.dense.up_proj)
        return project((F.silu(gate) * up), self.dense.down_proj)
