"""The latent cache in pages: a sequence holds as many as it needs, whatever its neighbours need."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import GenerationError
from kimi_k2.model.cache import LatentCache
from kimi_k2.ops.mla_paged import gather_pages, store_pages

PAGE = 64


def pages_of(slots: int) -> int:
    """Pages that hold so many slots of one sequence."""
    return -(-slots // PAGE)


def pages_pay(slots: Sequence[int]) -> bool:
    """Whether sequences of so many slots take less than half the memory in pages. Otherwise one piece is simpler."""
    return 2 * sum(map(pages_of, slots)) < len(slots) * pages_of(max(slots))


class PagedCache(LatentCache):
    """`LatentCache` whose `data` is [layers, pages + 1, 64, cache_dim]; page 0 belongs to no sequence and stays zero.

    `block_table` int32 [B, most pages of a sequence] names each sequence's pages. It can be written anew, and steps
    captured in a CUDA graph follow it.

    Args:
        config: as LatentCache takes it.
        batch: number of sequences.
        pages: of all sequences together.
        max_length: most slots of a sequence.
        dtype, device: as LatentCache takes them.

    Raises:
        ValueError: `max_length` exceeds `max_position_embeddings`.
    """

    def __init__(
        self,
        config: KimiK2Config,
        batch: int,
        pages: int,
        max_length: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.check_length(config, max_length)
        self.max_length, self.pages = max_length, pages
        shape = (config.num_hidden_layers, pages + 1, PAGE, config.cache_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self.block_table = torch.zeros(batch, pages_of(max_length), dtype=torch.int32, device=device)

    @property
    def batch(self) -> int:
        """Number of sequences."""
        return self.block_table.shape[0]

    def fits(self, slots: Sequence[int]) -> bool:
        """Whether `assign` would take sequences of so many slots."""
        return len(slots) == self.batch and max(slots) <= self.max_length and sum(map(pages_of, slots)) <= self.pages

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
        table, begin = torch.zeros(self.block_table.shape, dtype=torch.int32), 1
        for row, needed in zip(table, slots, strict=True):
            count = pages_of(needed)
            row[:count] = torch.arange(begin, begin + count)
            begin += count
        self.block_table.copy_(table)

    def slots(self, positions: Tensor) -> Tensor:
        """int64 [B, S], negative for padding, to slots numbered through all pages, as `store_pages` takes them."""
        at = positions.clamp(min=0)
        pages = self.block_table.gather(1, at // PAGE).long()
        return torch.where(positions >= 0, pages * PAGE + at % PAGE, -1)

    def update(self, layer: int, entries: Tensor, positions: Tensor, length: int) -> Tensor:
        """As LatentCache's; what is returned is a copy."""
        store_pages(self.data[layer], entries.flatten(0, 1), self.slots(positions).flatten())
        return gather_pages(self.data[layer], self.block_table, length)
