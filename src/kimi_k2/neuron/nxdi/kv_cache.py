"""MLA's compressed cache under flash decoding, and for the kernel of whole layers."""

from __future__ import annotations

from typing import Any

from neuronx_distributed_inference.modules.flashdecode.utils import EXTRA_RESERVED_SPACE, get_cache_size
from torch import Tensor

from kimi_k2.contrib_model import kv_cache as base
from kimi_k2.errors import ConfigError

from .flash_decoding import own_positions, slots_to_write


class LatentKVCacheManager(base.LatentKVCacheManager):
    """The hand-written class's; with flash decoding each of `num_cores_per_group` ranks has its part of the positions.

    A kernel that runs all layers is given the whole.
    """

    def _init_kv_shape(self, config: Any, layer_to_cache_size_mapping: Any = None) -> None:
        neuron = config.neuron_config
        if layer_to_cache_size_mapping:
            raise ConfigError("expected None: layers' caches are of one size", field="layer_to_cache_size_mapping")
        if not neuron.is_prefill_stage and neuron.batch_size < neuron.kv_cache_batch_size:
            # Upstream then writes both slots with an index of the K slot's width.
            raise ConfigError("expected tkg_batch_size, the batch of decode", field="kv_cache_batch_size")
        super()._init_kv_shape(config)
        if self.flash_decoding_enabled:
            length = get_cache_size(neuron.max_length, self.num_cores_per_group)
            self.k_shape, self.v_shape = ((*shape[:2], length, shape[3]) for shape in (self.k_shape, self.v_shape))

    def get_cache(self, seq_len: int, **kwargs: Any) -> Any:
        """NxDI's; a kernel that runs all layers is given the whole."""
        caches = super().get_cache(seq_len, **kwargs)
        if (whole := kwargs.get("whole")) is not None:
            whole.caches = caches
        return caches

    def get_kv_by_layer_id(self, idx: int, seq_len: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """NxDI's, up to slot `seq_len`; with flash decoding without the slots that NxDI adds to it.

        The kernel of whole layers is given the whole cache: a graph would copy a part of it before the call.
        """
        if self.neuron_config.layers:
            kwargs["skip_slice"] = True
        if self.flash_decoding_enabled:
            seq_len -= EXTRA_RESERVED_SPACE
        layer_cache: tuple[Tensor, Tensor] = super().get_kv_by_layer_id(idx, seq_len, *args, **kwargs)
        return layer_cache

    def update_kv_by_layer_id(
        self,
        idx: int,
        is_for_context_encoding: bool,
        seq_ids: Tensor,
        position_ids: Tensor,
        kv_per_layer: tuple[Tensor, Tensor],
        seq_len: int,
        scatter_index: Tensor | None = None,
        kv_active_mask: Tensor | None = None,
        kvcache_buffer: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """NxDI's, with each rank's own positions under flash decoding; (rotary keys, latents) of layer `idx`."""
        if self.flash_decoding_enabled:
            ranks = self.num_cores_per_group
            if not is_for_context_encoding:
                assert kv_active_mask is not None  # NxDI makes it for every step
                caches = self._fetch_cache(idx, kvcache_buffer)
                slots = slots_to_write(position_ids, kv_active_mask, seq_ids, ranks, caches[0].shape[2])
                slots = slots[:, None, :, None]
                keys, latents = (
                    cache.scatter(2, slots.expand_as(entries), entries)
                    for cache, entries in zip(caches, kv_per_layer, strict=True)
                )
                return keys, latents
            rank = self.global_rank.get_rank()
            keys, latents = (own_positions(entries, rank, ranks) for entries in kv_per_layer)
            kv_per_layer = keys, latents
        updated: tuple[Tensor, Tensor] = super().update_kv_by_layer_id(
            idx, is_for_context_encoding, seq_ids, position_ids, kv_per_layer, seq_len,
            scatter_index=scatter_index, kv_active_mask=kv_active_mask, kvcache_buffer=kvcache_buffer, **kwargs,
        )  # fmt: skip
        return updated
