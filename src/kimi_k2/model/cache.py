"""The compressed KV cache of MLA: one latent and one rotary key a token a layer, held once."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.ops.cache import store_entries


class LatentCache:
    """Cache [layers, B, max_length, cache_dim]: the normed latent (kv_lora_rank), then the rotated key.

    Token at position p of a sequence lies in slot p, so a causal mask needs positions alone.

    Args:
        config: gives cache_dim (576 for Kimi-K2) and the number of layers.
        batch: number of sequences.
        max_length: slots a sequence.
        dtype, device: of the cache; e4m3 halves bfloat16's bytes (values as they are, scale 1).

    Raises:
        ValueError: `max_length` exceeds `max_position_embeddings`.
    """

    def __init__(
        self,
        config: KimiK2Config,
        batch: int,
        max_length: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if max_length > config.max_position_embeddings:
            raise ValueError(
                f"max_length {max_length} exceeds max_position_embeddings {config.max_position_embeddings}"
            )
        self.max_length = max_length
        shape = (config.num_hidden_layers, batch, max_length, config.cache_dim)
        # Zeros, not garbage: a masked slot still takes part in a product, and 0 * NaN is NaN.
        self.data = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.data.nbytes

    def update(self, layer: int, entries: Tensor, positions: Tensor, length: int) -> Tensor:
        """Store new entries and return the first `length` slots of every sequence.

        Args:
            layer: decoder layer, from 0.
            entries: [B, S, cache_dim].
            positions: int64 [B, S]; a negative one marks padding and is not stored.
            length: slots to return; at least the largest position + 1.

        Returns:
            [B, length, cache_dim], a view of the cache.
        """
        store_entries(self.data[layer], entries, positions)
        return self.data[layer, :, :length]
