"""Multi-head latent attention with absorbed weights on NxD's parallel layers.

The same mathematics as `kimi_k2.ops.mla` (absorbed form) in NxDI's two stages: prefill attends within the
prompt, decode to the cache and to the token itself. Heads are split over the tensor-parallel ranks, and so
are the columns of the two down projections; every rank has the whole latent. With flash decoding the cache is
split over groups of ranks by positions, see flash_decoding.py. With sequence parallelism a rank is given its part of
the sequence and gives its part back; in between it has its heads of the whole.
"""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear
from neuronx_distributed.parallel_layers.mappings import gather_from_sequence_parallel_region
from neuronx_distributed_inference.modules.flashdecode.utils import EXTRA_RESERVED_SPACE
from torch import Tensor, nn

from kimi_k2.model.rope import rope_inv_freq
from kimi_k2.ops.embedding import apply_rotary_interleaved
from kimi_k2.sharding.attention_tiles import in_place_of_linears

from .attention_tiles import AttentionTiles
from .config import KimiK2InferenceConfig
from .flash_decoding import combine, group_heads, own_tokens
from .lora import project
from .norm import make_rms_norm
from .products import dot_float32


def over_positions(heads: Tensor, shared: Tensor, dimension: int) -> Tensor:
    """[B, h, S, x] by a matrix [B, ., .] that all heads share, summed over its `dimension`; float32."""
    return dot_float32(heads, shared, ([3], [dimension]), ([0], [0]))


class KimiK2Attention(nn.Module):
    """MLA of one layer; `num_heads` is this rank's share, in CPU mode too."""

    def __init__(self, config: KimiK2InferenceConfig, moe: bool = False) -> None:
        super().__init__()
        hf, neuron = config.hf, config.neuron_config
        self.hf = hf
        self.num_heads = hf.num_attention_heads // neuron.tp_degree
        self.flash_decoding = neuron.flash_decoding_enabled
        self.sequence_parallel = neuron.sequence_parallel_enabled
        dtype, heads = neuron.torch_dtype, hf.num_attention_heads
        # Both down projections in one matrix, split over the ranks and gathered. Held whole by every rank, as is usual,
        # they would be half of all bytes that a decode step reads at 64 ranks.
        self.qkv_a_proj = ColumnParallelLinear(
            hf.hidden_size, hf.qkv_a_dim, bias=False, gather_output=True, dtype=dtype
        )
        self.q_a_layernorm = make_rms_norm(hf.q_lora_rank, hf.latent_norm_eps)
        self.kv_a_layernorm = make_rms_norm(hf.kv_lora_rank, hf.latent_norm_eps)
        kind = config.layout.attention_tiles(hf) if moe else ""
        self.tiles = AttentionTiles(config) if kind else None
        self.tiles_alone = in_place_of_linears(kind)
        if not self.tiles_alone:
            column = {"bias": False, "gather_output": False, "dtype": dtype}
            self.q_b_proj = ColumnParallelLinear(hf.q_lora_rank, heads * hf.qk_head_dim, **column)
            self.kv_b_proj = ColumnParallelLinear(
                hf.kv_lora_rank, heads * (hf.qk_nope_head_dim + hf.v_head_dim), **column
            )
            self.o_proj = RowParallelLinear(
                heads * hf.v_head_dim, hf.hidden_size, bias=False, input_is_parallel=True, dtype=dtype,
                reduce_dtype=neuron.rpl_reduce_dtype,
                sequence_parallel_enabled=neuron.sequence_parallel_enabled, sequence_dimension=1,
            )  # fmt: skip
        self.rotary_multiplier = hf.rope_scaling.rotary_multiplier if hf.rope_scaling else 1.0
        # Python numbers, made a float32 tensor within the trace. NxDI's load_module casts every float parameter and
        # buffer to the model's dtype; in BF16 the angle is off by 1.7 radians at position 1000.
        self.inv_freq: list[float] = rope_inv_freq(hf, "cpu").tolist()

    def rotation(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [B, S, qk_rope_head_dim / 2] at the given positions; the angles are float32."""
        inv_freq = torch.tensor(self.inv_freq, dtype=torch.float32, device=position_ids.device)
        angles = position_ids.unsqueeze(-1).to(torch.float32) * inv_freq
        return (angles.cos() * self.rotary_multiplier).to(dtype), (angles.sin() * self.rotary_multiplier).to(dtype)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_value: tuple[Tensor, Tensor] | None = None,
        active_mask: Tensor | None = None,
        cos_cache: Tensor | None = None,
        sin_cache: Tensor | None = None,
        adapter_ids: Tensor | None = None,
        own: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor]:
        """Attend.

        Args:
            hidden_states: [B, S, H], normed; with sequence parallelism [B, S / ranks, H], as is the output.
            attention_mask: bool, [B, 1, S, S] causal at prefill, [B, 1, 1 or S, cache length] at decode and behind a
                cached prefix (without the pass's own tokens; with flash decoding over the reserved slots too).
            position_ids: [B, S].
            past_key_value: at decode, and of a prompt's cached prefix, (rotary keys [B, 1, L, rope], latents
                [B, 1, L, rank]); with flash decoding those of this rank's positions.
            active_mask: bool [B, 1, S, S] between the pass's own tokens; None for a single one. With flash decoding
                also of a single one, and True only where the key's position is this rank's.
            cos_cache, sin_cache: the rotation, once a layer has computed it.
            adapter_ids: [B], each sequence's LoRA adapter, where there are any.
            own: with flash decoding behind a cached prefix, int64 [S / ranks], the pass's tokens that this rank attends
                to; `active_mask` is not looked at then.

        Returns:
            (output [B, S, H], new cache entries, cos, sin).
        """
        hf = self.hf
        if self.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, 1)
        widths = [hf.q_lora_rank, hf.kv_lora_rank, hf.qk_rope_head_dim]
        slots = attention_mask.shape[-1]
        if self.flash_decoding and past_key_value is not None and own is None:
            slots -= EXTRA_RESERVED_SPACE  # NxDI's mask is over the slots that it reserves too
            attention_mask = attention_mask[..., :slots]
        q_down, latent, k_rope = self.qkv_a_proj(hidden_states).split(widths, dim=-1)
        q_nope, q_rope = self._queries(self.q_a_layernorm(q_down), adapter_ids)
        latent = self.kv_a_layernorm(latent)
        if cos_cache is None or sin_cache is None:
            cos_cache, sin_cache = self.rotation(position_ids, hidden_states.dtype)
        q_rope = apply_rotary_interleaved(q_rope, cos_cache.unsqueeze(2), sin_cache.unsqueeze(2))
        k_rope = apply_rotary_interleaved(k_rope, cos_cache, sin_cache)

        w_uk, w_uv = self._kv_b()
        q_latent = torch.einsum("bshn,hnr->bhsr", q_nope, w_uk)
        q_rope = q_rope.transpose(1, 2)

        def scores(keys: Tensor, latents: Tensor) -> Tensor:
            return (over_positions(q_latent, latents, 2) + over_positions(q_rope, keys, 2)) * hf.softmax_scale

        if past_key_value is None:
            present = scores(k_rope, latent)
            weights = self._masked(present, attention_mask).softmax(dim=-1).to(hidden_states.dtype)
            summed = over_positions(weights, latent, 1)
        else:
            keys, latents = (slot.squeeze(1) for slot in past_key_value)
            if self.flash_decoding:
                widths = [hf.kv_lora_rank, hf.qk_rope_head_dim]
                q_latent, q_rope = group_heads(torch.cat((q_latent, q_rope), dim=-1)).split(widths, dim=-1)
            keys, latents = keys[:, :slots], latents[:, :slots]  # all of it, beside the kernel of whole layers
            prior = self._masked(scores(keys, latents), attention_mask)
            active = (k_rope, latent)
            if own is not None:
                active, active_mask = own_tokens(active, own)
            present = scores(*active)
            if active_mask is not None:
                present = self._masked(present, active_mask)
            both = torch.cat((prior, present), dim=-1)
            weights = both.softmax(dim=-1).to(hidden_states.dtype)
            past = prior.shape[-1]
            summed = over_positions(weights[..., :past], latents, 1) + over_positions(weights[..., past:], active[1], 1)
            if self.flash_decoding:
                summed = combine(summed, both.logsumexp(dim=-1, keepdim=True))
        return self._output(summed, w_uv, adapter_ids), self._entries(k_rope, latent), cos_cache, sin_cache

    def _queries(self, normed: Tensor, adapter_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """[B, S, q_lora_rank] to this rank's queries, [B, S, h, nope] and [B, S, h, rope]."""
        if self.tiles is not None and self.tiles_alone:
            return self.tiles.queries(normed)
        q = project(self.q_b_proj, normed, adapter_ids).view(*normed.shape[:2], self.num_heads, self.hf.qk_head_dim)
        nope, rope = q.split([self.hf.qk_nope_head_dim, self.hf.qk_rope_head_dim], dim=-1)
        return nope, rope

    def _kv_b(self) -> tuple[Tensor, Tensor | None]:
        """W_UK and W_UV, [h, nope, rank] and [h, v, rank]; the second is None where it lies in tiles alone."""
        if self.tiles is not None and self.tiles_alone:
            return self.tiles.absorbed(), None
        sizes = [self.hf.qk_nope_head_dim, self.hf.v_head_dim]
        w_uk, w_uv = self.kv_b_proj.weight.view(self.num_heads, sum(sizes), self.hf.kv_lora_rank).split(sizes, dim=1)
        return w_uk, w_uv

    def _output(self, summed: Tensor, w_uv: Tensor | None, adapter_ids: Tensor | None) -> Tensor:
        """Sums of latents float32 [B, h, S, rank] to [B, S, H], summed over the ranks; `w_uv` of `_kv_b`."""
        if w_uv is None:
            assert self.tiles is not None
            return self.tiles.output(self.tiles.values(summed), self.sequence_parallel)
        values = torch.einsum("bhsr,hvr->bshv", summed.to(w_uv.dtype), w_uv).flatten(2)
        return project(self.o_proj, values, adapter_ids)

    @staticmethod
    def _entries(k_rope: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """What the cache takes: [B, 1, S, rope] and [B, 1, S, rank]."""
        return k_rope.unsqueeze(1), latent.unsqueeze(1)

    @staticmethod
    def _masked(scores: Tensor, mask: Tensor) -> Tensor:
        # NxDI's own for several tokens with flash decoding is of integers.
        return torch.where(mask.to(torch.bool), scores, torch.finfo(scores.dtype).min)
