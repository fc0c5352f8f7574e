"""MLA's compressed cache in NxDI's KV manager: each value held once."""

from __future__ import annotations

from typing import Any

from neuronx_distributed_inference.modules.kvcache.kv_cache_manager import (
    KV_CACHE_PAD_FOR_SEQ_IDS_MASKING,
    KVCacheManager,
)

from kimi_k2.errors import ConfigError


class LatentKVCacheManager(KVCacheManager):
    """The K slot holds the turned rotary key (64 values a token), the V slot the normed latent (512).

    NxDI keeps two tensors a layer. Filling both with the whole entry, as is usual for MLA, doubles the cache: 140,544
    instead of 70,272 bytes a token in BF16. Splitting the entry between them costs nothing. Every rank holds
    the whole cache: the latent is shared by all heads.
    """

    def _init_kv_shape(self, config: Any, layer_to_cache_size_mapping: Any = None) -> None:
        neuron = config.neuron_config
        if layer_to_cache_size_mapping:
            raise ConfigError("expected None: layers' caches are of one size", field="layer_to_cache_size_mapping")
        if not neuron.is_prefill_stage and neuron.batch_size < neuron.kv_cache_batch_size:
            # Upstream then writes both slots with an index of the K slot's width.
            raise ConfigError("expected tkg_batch_size, the batch of decode", field="kv_cache_batch_size")
        self.padded_layer_ids: list[int] = []
        # Upstream lets the lines that take no part in a step write behind the last position.
        length = neuron.max_length + (KV_CACHE_PAD_FOR_SEQ_IDS_MASKING if neuron.apply_seq_ids_mask else 0)
        self.k_shape = (neuron.kv_cache_batch_size, 1, length, config.hf.qk_rope_head_dim)
        self.v_shape = (neuron.kv_cache_batch_size, 1, length, config.hf.kv_lora_rank)
