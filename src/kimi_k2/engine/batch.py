"""A step's new tokens as each layer receives them: prompts, chunks of prompts and decodes in one ragged batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from kimi_k2.engine.spread import Gathered, Spread
from kimi_k2.model.cache import LatentCache, pages_of
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.ops.mla import Ragged, attention_plan
from kimi_k2.ops.registry import PLAIN
from kimi_k2.ops.streams import fork


def new_cache(
    model: KimiK2ForCausalLM,
    batch: int,
    length: int,
    slots: Sequence[int] | None = None,
    multiple: int = 1,
    *,
    paged: bool = False,
    dtype: torch.dtype | None = None,
) -> LatentCache:
    """A cache for `batch` sequences: in pages if that takes less than half the memory, else one piece for each.

    Args:
        length: slots of the longest sequence.
        slots: what each sequence fills, at most `length`; None is `length`.
        multiple: lengths are rounded up to one of it, as far as the model's positions go.
        paged: in pages in any case.
        dtype: None is the model's `kv_cache_dtype`.
    """
    most = model.config.max_position_embeddings
    longest, *rounded = (min(-(-count // multiple) * multiple, most) for count in (length, *(slots or ())))
    rounded = rounded or [longest] * batch
    total = sum(map(pages_of, rounded))
    pages = total if paged or 2 * total < batch * pages_of(max(rounded)) else None
    cache = model.new_cache(batch, longest, dtype, pages)
    if slots is not None or paged:
        cache.assign(slots or [length] * batch)
    return cache


# Slots whose keys and values are expanded at once: 320 values of a head each, 340 MB for 8 heads in BF16.
MOST_SLOTS = 65536


class Chunk(NamedTuple):
    """S new tokens of each of B sequences, whose attention is computed in one call.

    Attributes:
        rows: B * S of the batch's, a sequence after the other.
        sequences: B rows of the batch's block table.
        positions: int64 [B, S]; a negative one marks padding.
        length: slots to attend over.
        whole: the tokens are those of the last S slots, none of them padding.
    """

    rows: slice
    sequences: slice
    positions: Tensor
    length: int
    whole: bool


class RaggedChunk(NamedTuple):
    """New tokens of several sequences, a different number of each, whose attention is computed in one call.

    Attributes:
        rows: of the batch's, a sequence after the other.
        queries: the new tokens of each sequence.
        keys: the slots of each sequence.
        places: page and offset of each slot, or which rank holds it; None where only the new tokens are attended to.
    """

    rows: slice
    queries: Ragged
    keys: Ragged
    places: tuple[Tensor, Tensor] | Gathered | None


class Single(NamedTuple):
    """What a `Batch` holds for its decodes; attributes as there."""

    cos: Tensor
    sin: Tensor
    slots: Tensor
    seq_lens: Tensor
    block_table: Tensor | None


# Called where attention first reads it.
Plan = Callable[[], Tensor | None]


def unplanned() -> None:
    """Where attention wants no plan."""


def planned(seq_lens: Tensor, cache: Tensor, heads: int, block_table: Tensor | None) -> Plan:
    """`attention_plan`, which one block makes: the rest of the GPU goes on, and the first attention joins it."""
    inputs = seq_lens, cache, heads, block_table
    if attention_plan.choose(*inputs).name == PLAIN:
        return unplanned
    return fork(partial(attention_plan, *inputs), seq_lens.device)


@dataclass
class Batch:
    """New tokens [T] of several sequences: one each of the first `decodes`, then those of the chunks, then padding.

    A batch without tokens is that of an idle data-parallel rank: layers then take part in the ranks' sums alone.

    Attributes:
        tokens: new tokens that are no padding behind the others.
        decodes: sequences with one new token; the first of the batch.
        seq_lens: int32 [B], tokens in the cache once the new ones are stored.
        slots: int64 [T], where each new token is stored, numbered through the cache; negative for padding.
        block_table: int32 [B, pages], of each sequence; None where sequence b has page b alone.
        chunks: of the sequences with several new tokens.
        rotation: cos and sin of each new token's position, each [T, qk_rope_head_dim / 2].
        plan: gives that of `planned` for the decodes.
        spread: the ranks that hold the sequences together; `seq_lens` and `block_table` are then of what is here.
        before_attention, after_attention: called with a layer's number, as engines that move caches ask.
    """

    tokens: int
    decodes: int
    seq_lens: Tensor
    slots: Tensor
    block_table: Tensor | None
    chunks: Sequence[Chunk | RaggedChunk] = ()
    rotation: tuple[Tensor, Tensor] = field(default_factory=lambda: (torch.empty(0), torch.empty(0)))
    plan: Plan = unplanned
    spread: Spread | None = None
    before_attention: Callable[[int], object] | None = None
    after_attention: Callable[[int], object] | None = None

    @cached_property
    def single(self) -> Single:
        """Of the decodes, the same for all layers."""
        rows, (cos, sin), table = self.decodes, self.rotation, self.block_table
        return Single(
            cos[:rows],
            sin[:rows],
            self.slots[:rows],
            self.seq_lens[:rows],
            None if table is None else table[:rows],
        )

    def phases(self) -> Iterator[tuple[slice, Batch]]:
        """Decodes and chunks as batches of their own, with the rows of each, so that neither sees the other."""
        count, (cos, sin) = self.decodes, self.rotation
        if not self.chunks or not count:
            yield slice(None), self
            return
        yield (
            slice(0, count),
            replace(self, tokens=count, slots=self.slots[:count], chunks=(), rotation=(cos[:count], sin[:count])),
        )
        chunks = [each._replace(rows=slice(each.rows.start - count, each.rows.stop - count)) for each in self.chunks]
        rest = {
            "slots": self.slots[count:],
            "rotation": (cos[count:], sin[count:]),
            "chunks": chunks,
        }
        yield slice(count, None), replace(self, tokens=self.tokens - count, decodes=0, **rest)  # type: ignore[arg-type]

    @classmethod
    def of_sequences(
        cls,
        starts: Sequence[int],
        query_starts: Tensor,
        seq_lens: Tensor,
        lengths: Sequence[int],
        block_table: Tensor,
        slots: Tensor,
        page: int,
        spread: Spread | None = None,
    ) -> Batch:
        """Of sequences whose lengths the host knows. Nothing is read back, and nothing copied from the host.

        Args:
            starts: where each sequence's new tokens begin, and where the last ends; the first sequences have one each.
            query_starts: int32 [B + 1], the same on the device.
            seq_lens, block_table, slots: see `Batch`.
            lengths: `seq_lens` of the sequences with more than one new token, which are the last.
            page: slots of a page.
            spread: see `Batch`; the lengths are whole ones all the same.
        """
        decodes = len(starts) - 1 - len(lengths)
        new = tuple(end - start for start, end in zip(starts[decodes:], starts[decodes + 1 :], strict=False))
        chunks: list[Chunk | RaggedChunk] = []
        together = sum(lengths) <= MOST_SLOTS
        if (len(lengths) > 1 and together) or (lengths and spread is not None):
            for some in [slice(0, len(new))] if together else [slice(row, row + 1) for row in range(len(new))]:
                if not any(new[some]):
                    continue
                first, last = decodes + some.start, decodes + some.stop
                begin, cached = query_starts[first : last + 1], (seq_lens[first:last], block_table[first:last])
                queries, whole = Ragged(new[some], begin - begin[0]), tuple(lengths[some])
                keys = None if new[some] == whole else _slots_of(queries, whole, *cached, page, spread)
                chunks.append(RaggedChunk(slice(starts[first], starts[last]), queries, *(keys or (queries, None))))
        else:
            for number, (count, length) in enumerate(zip(new, lengths, strict=True), decodes):
                at = torch.arange(length - count, length, device=slots.device).unsqueeze(0)
                rows = slice(starts[number], starts[number + 1])
                chunks += [Chunk(rows, slice(number, number + 1), at, length, whole=True)] if count else []
        seq_lens = seq_lens if spread is None else spread.held(seq_lens)
        return cls(starts[-1], decodes, seq_lens, slots, block_table, chunks, spread=spread)


def by_token(starts: Tensor, seq_lens: Tensor, block_table: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Sequences with several new tokens as so many with one, each of which sees those before it. Nothing is read back.

    All new tokens are stored before any attends, so that they may be decodes of a `Batch`.

    Args:
        starts: int32 [B + 1], where each sequence's new tokens begin, and where the last ends.
        seq_lens, block_table: of the sequences, see `Batch`.
        rows: the new tokens, and padding behind them.

    Returns:
        `seq_lens` [rows], 0 for padding, and `block_table` [rows, pages].
    """
    row = torch.arange(rows, dtype=starts.dtype, device=starts.device)
    sequence = torch.searchsorted(starts[1:].contiguous(), row, right=True)
    padding, sequence = sequence >= len(seq_lens), sequence.clamp(max=len(seq_lens) - 1)
    lengths = seq_lens[sequence] - (starts[sequence + 1] - 1 - row)
    return lengths.masked_fill(padding, 0), block_table[sequence]


def _slots_of(
    new: Ragged, lengths: tuple[int, ...], seq_lens: Tensor, block_table: Tensor, page: int, spread: Spread | None
) -> tuple[Ragged, tuple[Tensor, Tensor] | Gathered]:
    """All slots of sequences, one sequence after the other; page and offset of each, or which rank holds it."""
    ends, count = seq_lens.cumsum(0, dtype=torch.int32), sum(lengths)
    keys = Ragged(lengths, torch.cat((seq_lens.new_zeros(1), ends)))
    if spread is not None:
        return keys, spread.gathered(new, keys, block_table, page)
    sequence = torch.arange(len(lengths), device=seq_lens.device).repeat_interleave(seq_lens, output_size=count)
    position = torch.arange(count, device=seq_lens.device) - keys.starts[sequence]
    pages = block_table[sequence, position.div(page, rounding_mode="floor")]
    return keys, (pages.long(), position % page)
