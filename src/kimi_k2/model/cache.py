"""The compressed KV cache of MLA: one latent and one rotary key a token a layer, held once."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError, GenerationError
from kimi_k2.ops.mla import store_entries

# Names as vLLM's --kv-cache-dtype has them.
KV_CACHE_DTYPES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn}


def kv_cache_dtype(name: str, config: KimiK2Config) -> torch.dtype | None:
    """What `--kv-cache-dtype NAME` means: `auto` is the checkpoint's own, None the model's compute dtype.

    Raises:
        ConfigError: another name.
    """
    if name == "auto":
        return torch.float8_e4m3fn if config.kv_cache_fp8 else None
    if name not in KV_CACHE_DTYPES:
        raise ConfigError(f"expected auto, {', '.join(KV_CACHE_DTYPES)}, got {name!r}", field="kv_cache_dtype")
    return KV_CACHE_DTYPES[name]


class LatentCache:
    """Cache [layers, B, max_length, cache_dim]: the normed latent (kv_lora_rank), then the rotated key.

    Token at position p of a sequence lies in slot p, so a causal mask needs positions alone.

    Args:
        config: gives cache_dim (576 for Kimi-K2) and the number of layers.
        batch: number of sequences.
        max_length: slots a sequence.
        dtype, device: of the cache; e4m3 halves bfloat16's bytes (values as they are, scale 1).

    Raises:
        GenerationError: `max_length` exceeds `max_position_embeddings`.
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
        self.check_length(config, max_length)
        self.max_length = max_length
        shape = (config.num_hidden_layers, batch, max_length, config.cache_dim)
        # Zeros, not garbage: a masked slot still takes part in a product, and 0 * NaN is NaN.
        self.data = torch.zeros(shape, dtype=dtype, device=device)

    @staticmethod
    def check_length(config: KimiK2Config, max_length: int) -> None:
        """GenerationError if `max_length` exceeds `max_position_embeddings`."""
        if max_length > config.max_position_embeddings:
            raise GenerationError(
                f"max_length {max_length} exceeds max_position_embeddings {config.max_position_embeddings}"
            )

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.data.shape[1]

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
