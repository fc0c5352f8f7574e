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

from .attention_tiles import AttentionBlockKernel, AttentionTiles
from .config import KimiK2InferenceConfig
from .early_router import EarlyLogits, OutputProjection, reduced
from .flash_decoding import combine, group_heads, own_tokens
from .kernels import AttentionKernel
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
        self.kernel = AttentionKernel(neuron.logical_nc_config) if neuron.kernels else None
        dtype, heads = neuron.torch_dtype, hf.num_attention_heads
        # Both down projections in one matrix, split over the ranks and gathered. Held whole by every rank, as is usual,
        # they would be half of all bytes that a decode step reads at 64 ranks.
        self.qkv_a_proj = ColumnParallelLinear(
            hf.hidden_size, hf.qkv_a_dim, bias=False, gather_output=True, dtype=dtype
        )
        self.q_a_layernorm = make_rms_norm(hf.q_lora_rank, hf.latent_norm_eps)
        self.kv_a_layernorm = make_rms_norm(hf.kv_lora_rank, hf.latent_norm_eps)
        kind = config.layout.attention_tiles(config.hf)
        self.tiles = AttentionTiles(config, moe) if kind else None
        in_tiles = neuron.kernels and self.tiles is not None and not self.flash_decoding
        self.block = AttentionBlockKernel(neuron.logical_nc_config) if in_tiles else None
        self.tiles_alone = in_place_of_linears(kind)
        if not self.tiles_alone:
            column = {"bias": False, "gather_output": False, "dtype": dtype}
            self.q_b_proj = ColumnParallelLinear(hf.q_lora_rank, heads * hf.qk_head_dim, **column)
            self.kv_b_proj = ColumnParallelLinear(
                hf.kv_lora_rank, heads * (hf.qk_nope_head_dim + hf.v_head_dim), **column
            )
            output = OutputProjection if neuron.kernels else RowParallelLinear
            self.o_proj = output(
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
        early: EarlyLogits | None = None,
        projected: Tensor | None = None,
        decode: bool = False,
        **_: Any,
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor]:
        """Attend.

        Args:
            hidden_states: [B, S, H], normed; with sequence parallelism [B, S / ranks, H], as is the output. Where the
                down projections are `projected` its values are not looked at.
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
            early: the layer's router logits, which are to be summed together with the output.
            projected: [B, S, q_lora_rank + cache_dim], the down projections where they are known.
            decode: whether this is a step, which kernels take where there are any.

        Returns:
            (output [B, S, H], new cache entries, cos, sin).
        """
        hf = self.hf
        if self.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, 1)
        widths = [hf.q_lora_rank, hf.kv_lora_rank, hf.qk_rope_head_dim]
        if projected is None:
            projected = self.qkv_a_proj(hidden_states)
        slots = attention_mask.shape[-1]
        if self.flash_decoding and past_key_value is not None and own is None:
            slots -= EXTRA_RESERVED_SPACE  # NxDI's mask is over the slots that it reserves too
            attention_mask = attention_mask[..., :slots]
        one = self.block is not None and decode and self.block.takes(projected, slots, early)
        if one and past_key_value is not None:
            return self._in_one_kernel(projected, attention_mask, position_ids, past_key_value, early)
        q_down, latent, k_rope = projected.split(widths, dim=-1)
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
            if decode and self.kernel is not None and self.kernel.takes(q_latent, slots):
                query, lengths = torch.cat((q_latent, q_rope), dim=-1), attention_mask[:, 0, 0].sum(dim=1)
                kernel_args = (query, latents, keys, latent, k_rope, lengths, hf.softmax_scale, slots)
                if query.shape[2] == 1 and not self.flash_decoding:
                    summed = self.kernel(*kernel_args)
                else:
                    cached = self.kernel.of_cache(*kernel_args)
                    assert active_mask is not None  # NxDI makes it for several tokens, and for a part of the cache
                    present = self._masked(scores(k_rope, latent), active_mask)
                    summed = self._with_present(cached, present, latent)
                return (
                    self._output(summed, w_uv, adapter_ids, early),
                    self._entries(k_rope, latent),
                    cos_cache,
                    sin_cache,
                )
            keys, latents = keys[:, :slots], latents[:, :slots]  # kernels are given the whole cache
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
        return self._output(summed, w_uv, adapter_ids, early), self._entries(k_rope, latent), cos_cache, sin_cache

    def _with_present(self, past: tuple[Tensor, Tensor], present: Tensor, latent: Tensor) -> Tensor:
        """Attention over the cache joined with that over the step's own tokens: sums of latents [B, h, S, rank].

        Args:
            past: sums float32 [B, heads, S, rank] and log-sum-exps [B, heads, S, 1] over this rank's slots.
            present: masked scores float32 [B, heads, S, S].
            latent: [B, S, rank], of the tokens.
        """
        sums, log_past = past
        log_present = present.logsumexp(dim=-1, keepdim=True)
        # Not logaddexp: torch_xla has none, and would compute it on the host, amid the trace.
        total = torch.cat((log_past, log_present), dim=-1).logsumexp(dim=-1, keepdim=True)
        weights = (present - total).exp().to(latent.dtype)
        summed = sums * (log_past - total).exp() + over_positions(weights, latent, 1)
        return combine(summed, total) if self.flash_decoding else summed

    def _in_one_kernel(
        self,
        projected: Tensor,
        attention_mask: Tensor,
        position_ids: Tensor,
        past_key_value: tuple[Tensor, Tensor],
        early: EarlyLogits | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor]:
        """A step of one token from its down projections; arguments and result as `forward`."""
        assert self.block is not None
        assert self.tiles is not None
        keys, latents = (slot.squeeze(1) for slot in past_key_value)
        rotation = self.rotation(position_ids, torch.float32)
        norms: Any = (self.q_a_layernorm.weight, self.kv_a_layernorm.weight)
        options = {
            "softmax_scale": self.hf.softmax_scale,
            "eps": self.hf.latent_norm_eps,
            "attended": attention_mask.shape[-1],
        }
        lengths = attention_mask.sum(dim=(1, 2, 3))
        own, latent, k_rope, part = self.block(
            projected, norms, self.tiles, rotation, (keys, latents), lengths, options, early
        )
        out = reduced(own, early, part, projected.dtype)
        cos, sin = (one.to(projected.dtype) for one in rotation)
        return out, self._entries(k_rope, latent), cos, sin

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

    def _output(
        self, summed: Tensor, w_uv: Tensor | None, adapter_ids: Tensor | None, early: EarlyLogits | None
    ) -> Tensor:
        """Sums of latents float32 [B, h, S, rank] to [B, S, H], summed over the ranks; `w_uv` of `_kv_b`."""
        if w_uv is None:
            assert self.tiles is not None
            return self.tiles.output(self.tiles.values(summed), early, self.sequence_parallel)
        values = torch.einsum("bhsr,hvr->bshv", summed.to(w_uv.dtype), w_uv).flatten(2)
        out: Tensor = project(self.o_proj, values, adapter_ids) if early is None else self.o_proj(values, early)
        return out

    @staticmethod
    def _entries(k_rope: Tensor, latent: Tensor) -> tuple[Tensor, Tensor]:
        """What the cache takes: [B, 1, S, rope] and [B, 1, S, rank]."""
        return k_rope.unsqueeze(1), latent.unsqueeze(1)

    @staticmethod
    def _masked(scores: Tensor, mask: Tensor) -> Tensor:
        # NxDI's own for several tokens with flash decoding is of integers.
        return torch.where(mask.to(torch.bool), scores, torch.finfo(scores.dtype).min)
