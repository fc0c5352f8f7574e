"""MLA's compressed cache in blocks, for prefix caching: NxDI's block layout with a token's values held once."""

from __future__ import annotations

from typing import Any

from neuronx_distributed_inference.modules.kvcache.block_kv_cache_manager import BlockKVCacheManager
from torch import Tensor

from .flash_decoding import own_block_slots


class LatentBlockKVCacheManager(BlockKVCacheManager):
    """Blocks [pa_num_blocks + 1, pa_block_size, 1, width]: 64 values of the rotary key in K, 512 of the latent in V.

    Which block holds which part of which sequence is the caller's: block tables and slots come with each pass. The last
    block takes what padding writes. Upstream tiles the blocks of short caches so that V need not be transposed for
    attention by head; the latent is read as it lies, so ours are not tiled.

    With flash decoding each of `num_cores_per_group` ranks holds its part of every block's positions: rank r those at
    r, r + g ... of a block. Tables and slots stay those of whole blocks.
    """

    def _init_kv_shape_for_prefix_caching(self, config: Any) -> None:
        neuron = config.neuron_config
        size = neuron.pa_block_size // config.num_cores_per_group
        blocks = (neuron.pa_num_blocks + self._NUM_EXTRA_RESERVED_BLOCK, size, 1)
        self.k_shape = (*blocks, config.hf.qk_rope_head_dim)
        self.v_shape = (*blocks, config.hf.kv_lora_rank)

    def get_cache(self, active_block_table: Tensor, whole: Any = None, **kwargs: Any) -> Any:
        """NxDI's; a kernel that runs all layers is given the sequences' caches, which NxDI gathers."""
        caches = super().get_cache(active_block_table, **kwargs)
        if whole is not None:
            whole.caches = caches
        return caches

    def update_kv_by_layer_id(
        self, idx: int, kv_per_layer: tuple[Tensor, Tensor], scatter_index: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """NxDI's, at the slots `scatter_index` [B, S]; with flash decoding each rank writes what is its own."""
        if self.flash_decoding_enabled:
            assert scatter_index is not None  # every pass with blocks has its slots
            scatter_index = own_block_slots(scatter_index, self.global_rank.get_rank(), self.num_cores_per_group)
        updated: tuple[Tensor, Tensor] = super().update_kv_by_layer_id(
            idx, kv_per_layer, scatter_index=scatter_index, **kwargs
        )
        return updated
