"""The latent cache in pages: a sequence holds as many as it needs, whatever its neighbours need."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import GenerationError
from kimi_k2.model.cache import LatentCache
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.ops.cache import chunk_slots, gather_pages, store_slots

PAGE = 64  # slots, as the kernels take them


def pages_of(slots: int) -> int:
    """Pages that hold so many slots of one sequence."""
    return -(-slots // PAGE)


def pages_pay(slots: Sequence[int]) -> bool:
    """Whether sequences of so many slots take less than half the memory in pages. Otherwise one piece is simpler."""
    return 2 * sum(map(pages_of, slots)) < len(slots) * pages_of(max(slots))


class PagedCache(LatentCache):
    """`LatentCache` whose `data` is [layers, N, page, cache_dim]: N pages, of any sequence.

    With `pages`, N = pages + 1: page 0 belongs to no sequence and stays zero. Without, sequence b has page b alone, of
    `max_length` slots, and the cache is one piece for each sequence.

    Args:
        config: as LatentCache takes it.
        batch: number of sequences.
        max_length: most slots of a sequence.
        pages: of 64 slots, of all sequences together.
        dtype, device: as LatentCache takes them.

    Attributes:
        block_table: int32 [B, most pages of a sequence], each sequence's pages. It can be written anew, and steps
            captured in a CUDA graph follow it.
        page: slots of a page.

    Raises:
        ValueError: `max_length` exceeds `max_position_embeddings`.
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
        self.pages, self.page = pages, max_length if pages is None else PAGE
        super().__init__(config, batch if pages is None else pages + 1, self.page, dtype=dtype, device=device)
        self.check_length(config, max_length)
        self.max_length = max_length
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
        """As LatentCache's; of several pages a sequence what is returned is a copy."""
        if self.pages is None:
            return super().update(layer, entries, positions, length)
        slots = chunk_slots(positions, self.block_table, self.page)
        store_slots(self.data[layer], entries.flatten(0, 1), slots.flatten())
        return gather_pages(self.data[layer], self.block_table, length)


def new_cache(
    model: KimiK2ForCausalLM,
    batch: int,
    length: int,
    slots: Sequence[int] | None = None,
    multiple: int = 1,
    *,
    paged: bool = False,
    dtype: torch.dtype | None = None,
) -> PagedCache:
    """A cache for `batch` sequences: in pages if that takes less than half the memory, else one piece for each.

    Args:
        length: slots of the longest sequence.
        slots: what each sequence fills, at most `length`; None is `length`.
        multiple: lengths are rounded up to one of it, as far as the model's positions go.
        paged: in pages in any case.
        dtype: None is the model's `kv_cache_dtype`.
    """
    most = model.config.max_position_embeddings
    longest, *rounded = (min(-(-one // multiple) * multiple, most) for one in (length, *(slots or ())))
    rounded = rounded or [longest] * batch if paged else rounded
    pages = sum(map(pages_of, rounded)) if rounded and (paged or pages_pay(rounded)) else None
    device, dtype = model.lm_head.weight.device, dtype or model.kv_cache_dtype or model.dtype
    cache = PagedCache(model.config, batch, longest, pages, dtype=dtype, device=device)
    if slots is not None or paged:
        cache.assign(slots or [length] * batch)
    return cache
