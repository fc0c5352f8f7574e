"""MLA's compressed cache in NxDI's KV manager: each value held once."""

from __future__ import annotations

from typing import Any

from neuronx_distributed_inference.modules.kvcache.kv_cache_manager import (
    KV_CACHE_PAD_FOR_SEQ_IDS_MASKING,
    KVCacheManager,
)


class LatentKVCacheManager(KVCacheManager):
    """The K slot holds the turned rotary key (64 values a token), the V slot the normed latent (512).

    NxDI keeps two tensors a layer. Filling both with the whole entry, as is usual for MLA, doubles the cache: 140,544
    instead of 70,272 bytes a token in BF16. The latent is shared by all heads, so every rank holds the whole cache.
    """

    def _init_kv_shape(self, config: Any, layer_to_cache_size_mapping: Any = None) -> None:
        neuron = config.neuron_config
        length = neuron.max_length
        if neuron.apply_seq_ids_mask:  # lines that take no part in a step write behind the last position
            length += KV_CACHE_PAD_FOR_SEQ_IDS_MASKING
        self.padded_layer_ids: list[int] = []
        self.k_shape = (neuron.kv_cache_batch_size, 1, length, config.qk_rope_head_dim)
        self.v_shape = (neuron.kv_cache_batch_size, 1, length, config.kv_lora_rank)
