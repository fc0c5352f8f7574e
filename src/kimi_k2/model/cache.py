"""The compressed KV cache of MLA: one latent and one rotary key a token a layer, held once.

In one piece for each sequence, or in pages: a sequence then holds as many as it needs, whatever its neighbours need.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError, GenerationError
from kimi_k2.ops.mla import gather_pages, store_slots, token_places

PAGE = 64  # slots, as the kernels take them

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


def pages_of(slots: int) -> int:
    """Pages that hold so many slots of one sequence."""
    return -(-slots // PAGE)


class LatentCache:
    """The normed latent (kv_lora_rank) and the rotated key of each token, in N pages of any sequence.

    With `pages`, N = pages + 1: page 0 belongs to no sequence and stays zero. Without, sequence b has page b alone, of
    `max_length` slots, and the cache is one piece for each sequence.

    Token at position p of a sequence lies in its slot p, so a causal mask needs positions alone.

    Args:
        config: gives cache_dim (576 for Kimi-K2) and the number of layers.
        batch: number of sequences.
        max_length: most slots of a sequence.
        pages: of 64 slots, of all sequences together.
        dtype, device: of the cache; e4m3 halves bfloat16's bytes (values as they are, scale 1).

    Attributes:
        data: [layers, N, page, cache_dim].
        block_table: int32 [B, most pages of a sequence], each sequence's pages. It can be written anew, and steps
            captured in a CUDA graph follow it.
        page: slots of a page.

    Raises:
        GenerationError: `max_length` exceeds `max_position_embeddings`.
    """

    def __init__(
        self,
        config: KimiK2Config,
        batch: int,
        max_length: int,
        pages: int | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if max_length > config.max_position_embeddings:
            raise GenerationError(
                f"max_length {max_length} exceeds max_position_embeddings {config.max_position_embeddings}"
            )
        self.pages, self.page, self.max_length = pages, max_length if pages is None else PAGE, max_length
        shape = (config.num_hidden_layers, batch if pages is None else pages + 1, self.page, config.cache_dim)
        # Zeros, not garbage: a masked slot still takes part in a product, and 0 * NaN is NaN.
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.block_table = torch.arange(batch, dtype=torch.int32, device=device).unsqueeze(1)
        if pages is not None:
            self.block_table = torch.zeros(batch, pages_of(max_length), dtype=torch.int32, device=device)

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.block_table.shape[0]

    @property
    def table(self) -> Tensor | None:
        """`block_table` as attention takes it: None where sequence b has page b alone."""
        return None if self.pages is None else self.block_table

    def fits(self, slots: Sequence[int]) -> bool:
        """Whether `assign` would take sequences of so many slots."""
        there = self.pages is None or sum(map(pages_of, slots)) <= self.pages
        return there and len(slots) == self.batch and max(slots) <= self.max_length

    def assign(self, slots: Sequence[int]) -> None:
        """Give each sequence the pages for so many slots; what the pages hold is the last sequences' and is masked.

        Raises:
            GenerationError: they do not fit.
        """
        if not self.fits(slots):
            raise GenerationError(
                f"{len(slots)} sequences of up to {max(slots)} slots, {sum(map(pages_of, slots))} pages, do not fit"
                f" {self.batch} sequences of {self.max_length} slots and {self.pages} pages"
            )
        if self.pages is None:
            return
        table, begin = torch.zeros(self.block_table.shape, dtype=torch.int32), 1
        for row, needed in zip(table, slots, strict=True):
            count = pages_of(needed)
            row[:count] = torch.arange(begin, begin + count)
            begin += count
        self.block_table.copy_(table)

    def update(self, layer: int, entries: Tensor, positions: Tensor, length: int) -> Tensor:
        """Store new entries and return the first `length` slots of every sequence.

        Args:
            layer: decoder layer, from 0.
            entries: [B, S, cache_dim].
            positions: int64 [B, S]; a negative one marks padding and is not stored.
            length: slots to return; at least the largest position + 1.

        Returns:
            [B, length, cache_dim]: a view of the cache, of several pages a sequence a copy.
        """
        return self.stored(self.data[layer], entries, positions, length)

    def stored(self, data: Tensor, entries: Tensor, positions: Tensor, length: int) -> Tensor:
        """`update` of a layer's `data` [N, page, width] that lies in the pages of this cache."""
        store_slots(data, entries.flatten(0, 1), token_places(positions, self.block_table, self.page)[1])
        return data[:, :length] if self.pages is None else gather_pages(data, self.block_table, length)
