"""Generation whose steps are replayed from CUDA graphs, where kernels take the model's experts.

A graph belongs to the cache that it was captured with, so both are kept from one generation to the next of its batch.
Where the sequences' lengths differ so much that pages take less than half the memory, the cache is in pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import takewhile

import torch

from kimi_k2.engine.cache import PagedCache, new_cache
from kimi_k2.engine.decode_step import DecodeStep, capturable
from kimi_k2.engine.generate import Decode, Step, decode_step, sequence_slots, slots_needed, stream
from kimi_k2.engine.layer_step import Reduce
from kimi_k2.engine.media_rows import MediaRows
from kimi_k2.engine.prompt_step import PromptStep
from kimi_k2.engine.sampler import SamplingParams
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.ops.registry import batch_invariant

# Slots of a kept cache come in this many: a slightly longer generation finds its graph again.
SLOTS = 1024
# Tokens of all sequences in a chunk of their prompts, if nothing else is asked for: what a chunk's intermediate values
# take of memory is bounded, and the experts are as fast as with more.
CHUNK = 16384


class Generator:
    """`generate.stream` of one model, one generation after another: two at a time would share a cache.

    Args:
        model: whole, or a rank's part, whose ranks must make the same calls.
        reduce, gather: see DecodeStep.
        keep: a prompt that begins as the one before and its reply did, as a chat's next turn does, is read from where
            they part; for one sequence of text at a time, and not in batch-invariant mode, as decode steps wrote the
            reply's part of the cache.
    """

    def __init__(
        self,
        model: KimiK2ForCausalLM,
        *,
        reduce: Reduce = lambda x: x,
        gather: Reduce = lambda x: x,
        keep: bool = False,
    ) -> None:
        self.model, self.reduce, self.gather, self.keep = model, reduce, gather, keep
        self._kept: tuple[PagedCache, list[int]] | None = None  # and the tokens that it holds
        self._step: DecodeStep | None = None
        self._prompt: PromptStep | None = None

    def prepare(self, batch: int, length: int, slots: Sequence[int] | None = None) -> tuple[PagedCache, Decode]:
        """A cache with `length` slots a sequence or more, and what decodes with it.

        Args:
            slots: what each sequence fills, at most `length`; None is `length`.
        """
        step = self._step
        if step is not None and step.cache.fits(slots or [length] * batch):
            step.cache.assign(slots or [length] * batch)
            return step.cache, step
        if not capturable(self.model, batch):
            cache = new_cache(self.model, batch, length)
            return cache, partial(decode_step, self.model, cache=cache)
        step = None  # its memory goes before the next one's comes
        self.close()
        cache = new_cache(self.model, batch, length, slots, SLOTS)
        graph = cache.data.is_cuda
        step = self._step = DecodeStep(self.model, cache, reduce=self.reduce, gather=self.gather, graph=graph)
        self._prompt = PromptStep(step)
        # Captured now, not in the first timed step; what this writes to slot 0 the prefill overwrites.
        step(torch.zeros_like(step.tokens), torch.zeros_like(step.positions))
        return cache, step

    def close(self) -> None:
        """Give up what is kept; the next generation makes it anew."""
        if self._prompt is not None:
            self._prompt.close()
        if self._step is not None:
            self._step.close()
        self._step = self._prompt = None

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        chunk_size: int | None = None,
        media: MediaRows | None = None,
    ) -> Iterator[Step]:
        """As `generate.stream`."""
        needed = slots_needed(self.model, prompts, params)
        decode: Decode
        kept, self._kept = self._kept, None  # an abandoned generation leaves nothing that is known
        if kept is not None and self._step is None and len(prompts) == 1 and kept[0].max_length >= needed:
            cache, decode = kept[0], partial(decode_step, self.model, cache=kept[0])
        else:
            slots = min(-(-needed // SLOTS) * SLOTS, self.model.config.max_position_embeddings) if self.keep else needed
            cache, decode = self.prepare(len(prompts), slots, sequence_slots(prompts, params))
        cached = 0
        if kept is not None and cache is kept[0] and len(prompts) == 1 and media is None and not batch_invariant():
            pairs = zip(kept[1], prompts[0][:-1], strict=False)
            cached = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        read = self._prompt if decode is self._step else None
        if read is not None and chunk_size is None:
            chunk_size = max(1, CHUNK // len(prompts))
        steps = stream(
            self.model, prompts, params, chunk_size=chunk_size, cache=cache, decode=decode, media=media, read=read,
            cached=cached,
        )  # fmt: skip
        return self._noted(cache, prompts[0], steps) if self.keep and len(prompts) == 1 and media is None else steps

    def _noted(self, cache: PagedCache, prompt: Sequence[int], steps: Iterator[Step]) -> Iterator[Step]:
        """The steps; behind each the cache holds all tokens but the newest."""
        held = list(prompt)
        for step in steps:
            self._kept = cache, list(held)
            held += [token for token in step.tokens if token is not None]
            yield step
