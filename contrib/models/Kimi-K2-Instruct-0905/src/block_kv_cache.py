"""MLA's compressed cache in blocks, for prefix caching: NxDI's block layout with a token's values held once."""

from __future__ import annotations

from typing import Any

from neuronx_distributed_inference.modules.kvcache.block_kv_cache_manager import BlockKVCacheManager


class LatentBlockKVCacheManager(BlockKVCacheManager):
    """Blocks [pa_num_blocks + 1, pa_block_size, 1, width]: 64 values of the rotary key in K, 512 of the latent in V.

    Which block holds which part of which sequence is the caller's: block tables and slots come with each pass. The last
    block takes what padding writes. Upstream tiles the blocks of short caches so that V need not be transposed for
    attention by head; the latent is read as it lies, so ours are not tiled.
    """

    def _init_kv_shape_for_prefix_caching(self, config: Any) -> None:
        neuron = config.neuron_config
        blocks = (neuron.pa_num_blocks + self._NUM_EXTRA_RESERVED_BLOCK, neuron.pa_block_size, 1)
        self.k_shape = (*blocks, config.hf.qk_rope_head_dim)
        self.v_shape = (*blocks, config.hf.kv_lora_rank)
