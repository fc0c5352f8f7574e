"""The hand-written class's attention with adapters, tiles for the kernel of whole layers, and flash decoding."""

from __future__ import annotations

from typing import Any

import torch
from neuronx_distributed_inference.modules.flashdecode.utils import EXTRA_RESERVED_SPACE
from torch import Tensor

from kimi_k2.contrib_model import attention as base
from kimi_k2.contrib_model.attention import masked, over_positions
from kimi_k2.sharding.attention_tiles import in_place_of_linears

from .attention_tiles import AttentionTiles
from .config import KimiK2InferenceConfig
from .flash_decoding import combine, group_heads, own_tokens
from .lora import project

Masks = tuple[Tensor, Tensor | None]


class KimiK2Attention(base.KimiK2Attention):
    """MLA of one layer.

    Args:
        moe: whether it is one of the layers that a step may run as one kernel, which reads tiles of its weights.
    """

    def __init__(self, config: KimiK2InferenceConfig, moe: bool = False) -> None:
        self.kind = config.layout.attention_tiles(config.hf) if moe else ""
        self.tiles_alone = in_place_of_linears(self.kind)
        super().__init__(config)
        self.hf = config.hf
        self.flash_decoding = config.neuron_config.flash_decoding_enabled

    def make_projections(self) -> None:
        """The linear layers; tiles in place of some of them, or beside."""
        super().make_projections()
        self.tiles = AttentionTiles(self.config) if self.kind else None
        if self.tiles_alone:
            del self.q_b_proj, self.kv_b_proj, self.o_proj

    def queries(self, normed: Tensor, adapter_ids: Tensor | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The base's, from tiles or with each sequence's adapter."""
        if self.tiles is not None and self.tiles_alone:
            return self.tiles.queries(normed)
        heads = project(self.q_b_proj, normed, adapter_ids).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        nope, rope = heads.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        return nope, rope

    def up_projections(self) -> tuple[Tensor, Tensor]:
        """The base's, or of tiles."""
        if self.tiles is not None and self.tiles_alone:
            return self.tiles.up_projections()
        return super().up_projections()

    def output(self, values: Tensor, adapter_ids: Tensor | None = None, **kwargs: Any) -> Tensor:
        """The base's, from tiles or with each sequence's adapter."""
        if self.tiles is not None and self.tiles_alone:
            return self.tiles.output(values, self.sequence_parallel)
        return project(self.o_proj, values, adapter_ids)

    def attend(
        self,
        nope: Tensor,
        rope: Tensor,
        key: Tensor,
        latent: Tensor,
        past: tuple[Tensor, Tensor] | None,
        masks: Masks,
        own: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The base's; with flash decoding over this rank's positions of the cache, joined with the group's others.

        Args:
            nope, rope, key, latent, past, masks: the base's; with flash decoding the cache's mask is over the slots
                that NxDI reserves too, and the step's own is True only where the key's position is this rank's.
            own: with flash decoding behind a cached prefix, int64 [S / ranks], the pass's tokens that this rank attends
                to; the step's own mask is not looked at then.
            kwargs: of NxDI.
        """
        if past is None:
            return super().attend(nope, rope, key, latent, past, masks)
        over_cache, among_own = masks
        slots = over_cache.shape[-1]
        if self.flash_decoding and own is None:
            slots -= EXTRA_RESERVED_SPACE
        # All of the cache is given, beside the kernel of whole layers.
        past, over_cache = (past[0][:, :, :slots], past[1][:, :, :slots]), over_cache[..., :slots]
        if not self.flash_decoding:
            return super().attend(nope, rope, key, latent, past, (over_cache, among_own))
        w_uk, w_uv = self.up_projections()
        absorbed = torch.cat((torch.einsum("bhsn,hnr->bhsr", nope, w_uk), rope), dim=-1)
        absorbed, rope = group_heads(absorbed).split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        keys, latents = (cache.squeeze(1) for cache in past)
        active = (key, latent)
        if own is not None:
            active, among_own = own_tokens(active, own)

        def scores(keys: Tensor, latents: Tensor) -> Tensor:
            return (over_positions(absorbed, latents, 2) + over_positions(rope, keys, 2)) * self.softmax_scale

        prior, present = masked(scores(keys, latents), over_cache), masked(scores(*active), among_own)
        both = torch.cat((prior, present), dim=-1)
        weights, length = both.softmax(dim=-1).to(latent.dtype), prior.shape[-1]
        summed = over_positions(weights[..., :length], latents, 1) + over_positions(weights[..., length:], active[1], 1)
        summed = combine(summed, both.logsumexp(dim=-1, keepdim=True))
        return torch.einsum("bhsr,hvr->bhsv", summed.to(latent.dtype), w_uv)
