"""Multi-head latent attention: prefill in full heads, decode in the latent space ("absorbed").

Heads are split over the ranks, and so are the columns of the two down projections; every rank has the whole latent.
With sequence parallelism a rank is given its part of the sequence and gives its part back.
"""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_distributed.parallel_layers.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn

from .layers import dot_float32, make_rms_norm

# Hugging Face builds both latent norms with its class default and never passes rms_norm_eps on.
LATENT_NORM_EPS = 1e-6


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[..., 2 n], neighbours in pairs, turned by cos and sin [..., n]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def over_positions(heads: Tensor, shared: Tensor, dimension: int) -> Tensor:
    """[B, h, S, x] by a matrix [B, ., .] that all heads share, summed over its `dimension`; float32."""
    return dot_float32(heads, shared, ([3], [dimension]), ([0], [0]))


def masked(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores, and the least float32 where the mask is False."""
    return scores if mask is None else torch.where(mask.to(torch.bool), scores, torch.finfo(scores.dtype).min)


class KimiK2Attention(nn.Module):
    """MLA of one layer; `num_heads` is this rank's share."""

    norm_eps = LATENT_NORM_EPS

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, neuron = config, config.neuron_config
        self.num_heads = config.num_attention_heads // neuron.tp_degree
        self.qk_nope_head_dim, self.qk_rope_head_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.v_head_dim, self.kv_lora_rank = config.v_head_dim, config.kv_lora_rank
        self.softmax_scale = config.softmax_scale
        self.sequence_parallel = neuron.sequence_parallel_enabled
        self.make_projections()
        self.q_a_layernorm = make_rms_norm(config.q_lora_rank, self.norm_eps)
        self.kv_a_layernorm = make_rms_norm(self.kv_lora_rank, self.norm_eps)
        # Python numbers, made a float32 tensor within the trace: NxDI casts every float buffer to the model's dtype,
        # and a BF16 frequency is off by 1.7 radians at position 1000.
        self.inv_freq, self.rotary_multiplier = config.rotary()

    def make_projections(self) -> None:
        """The linear layers."""
        config, neuron = self.config, self.config.neuron_config
        heads, dtype = config.num_attention_heads, neuron.torch_dtype
        # Both down projections in one matrix, split over the ranks and gathered. Held whole by every rank, as is usual,
        # they would be half of all bytes that a decode step reads at 64 ranks.
        self.qkv_a_proj = ColumnParallelLinear(
            config.hidden_size,
            config.q_lora_rank + self.kv_lora_rank + self.qk_rope_head_dim,
            bias=False,
            gather_output=True,
            dtype=dtype,
        )
        column = {"bias": False, "gather_output": False, "dtype": dtype}
        self.q_b_proj = ColumnParallelLinear(
            config.q_lora_rank, heads * (self.qk_nope_head_dim + self.qk_rope_head_dim), **column
        )
        self.kv_b_proj = ColumnParallelLinear(
            self.kv_lora_rank, heads * (self.qk_nope_head_dim + self.v_head_dim), **column
        )
        self.o_proj = RowParallelLinear(
            heads * self.v_head_dim, config.hidden_size, bias=False, input_is_parallel=True, dtype=dtype,
            reduce_dtype=neuron.rpl_reduce_dtype,
            sequence_parallel_enabled=self.sequence_parallel, sequence_dimension=1,
        )  # fmt: skip

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_value: tuple[Tensor, Tensor] | None = None,
        active_mask: Tensor | None = None,
        cos_cache: Tensor | None = None,
        sin_cache: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor]:
        """Attend.

        Args:
            hidden_states: [B, S, H], normed; with sequence parallelism [B, S / ranks, H], as is the output.
            attention_mask: bool, [B, 1, S, S] at prefill, [B, 1, 1 or S, L] over the cache at decode.
            position_ids: [B, S].
            past_key_value: at decode (rotary keys [B, 1, L, rope], latents [B, 1, L, rank]).
            active_mask: bool [B, 1, S, S] between a step's own tokens; None for a single one.
            cos_cache, sin_cache: the rotation, once a layer has computed it.
            kwargs: NxDI's others, which `queries`, `attend` and `output` are given.

        Returns:
            (output [B, S, H], the cache's new entries, cos, sin).
        """
        if self.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, 1)
        q_down, latent, key = self.qkv_a_proj(hidden_states).split(
            [self.config.q_lora_rank, self.kv_lora_rank, self.qk_rope_head_dim], dim=-1
        )
        if cos_cache is None or sin_cache is None:
            cos_cache, sin_cache = self.rotation(position_ids, hidden_states.dtype)
        nope, rope = self.queries(self.q_a_layernorm(q_down), **kwargs)
        rope = rotated(rope, cos_cache.unsqueeze(1), sin_cache.unsqueeze(1))
        key = rotated(key, cos_cache, sin_cache)
        latent = self.kv_a_layernorm(latent)
        masks = (attention_mask, active_mask)
        values = self.attend(nope, rope, key, latent, past_key_value, masks, **kwargs)
        out = self.output(values.transpose(1, 2).flatten(2), **kwargs)
        return out, (key.unsqueeze(1), latent.unsqueeze(1)), cos_cache, sin_cache

    def rotation(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [B, S, rope / 2] at the positions; the angles are float32."""
        inv_freq = torch.tensor(self.inv_freq, dtype=torch.float32, device=position_ids.device)
        angles = position_ids.unsqueeze(-1).to(torch.float32) * inv_freq
        return (angles.cos() * self.rotary_multiplier).to(dtype), (angles.sin() * self.rotary_multiplier).to(dtype)

    def queries(self, normed: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """[B, S, q_lora_rank] to this rank's queries [B, h, S, nope] and [B, h, S, rope]."""
        heads = self.q_b_proj(normed).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        return heads.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """W_UK [h, nope, rank] and W_UV [h, value, rank]."""
        weight = self.kv_b_proj.weight.view(self.num_heads, self.qk_nope_head_dim + self.v_head_dim, self.kv_lora_rank)
        return weight.split([self.qk_nope_head_dim, self.v_head_dim], dim=1)

    def attend(
        self,
        nope: Tensor,
        rope: Tensor,
        key: Tensor,
        latent: Tensor,
        past: tuple[Tensor, Tensor] | None,
        masks: tuple[Tensor, Tensor | None],
        **kwargs: Any,
    ) -> Tensor:
        """Queries [B, h, S, .] over the step's own keys [B, S, rope] and latents [B, S, rank], and those of the cache.

        Returns:
            [B, h, S, value].
        """
        w_uk, w_uv = self.up_projections()
        if past is None:  # fewer multiplications than in the latent space
            keys, values = (torch.einsum("bsr,hnr->bhsn", latent, weight) for weight in (w_uk, w_uv))
            scores = dot_float32(nope, keys, ([3], [3]), ([0, 1], [0, 1])) + over_positions(rope, key, 2)
            weights = masked(scores * self.softmax_scale, masks[0]).softmax(dim=-1).to(latent.dtype)
            return dot_float32(weights, values, ([3], [2]), ([0, 1], [0, 1])).to(latent.dtype)
        keys, latents = (slots.squeeze(1) for slots in past)
        absorbed = torch.einsum("bhsn,hnr->bhsr", nope, w_uk)
        cached = (over_positions(absorbed, latents, 2) + over_positions(rope, keys, 2)) * self.softmax_scale
        own = (over_positions(absorbed, latent, 2) + over_positions(rope, key, 2)) * self.softmax_scale
        scores = torch.cat((masked(cached, masks[0]), masked(own, masks[1])), dim=-1)
        weights, length = scores.softmax(dim=-1).to(latent.dtype), cached.shape[-1]
        summed = over_positions(weights[..., :length], latents, 1) + over_positions(weights[..., length:], latent, 1)
        return torch.einsum("bhsr,hvr->bhsv", summed.to(latent.dtype), w_uv)

    def output(self, values: Tensor, **kwargs: Any) -> Tensor:
        """[B, S, heads * value] to [B, S, H], summed over the ranks."""
        return self.o_proj(values)
