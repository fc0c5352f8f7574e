"""Generation: prefill, decode, sampling, and the time of every step.

A graph belongs to the cache that it was captured with, so both are kept from one generation to the next of its batch.
Where the sequences' lengths differ so much that pages take less than half the memory, the cache is in pages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from typing import Any, Protocol

import torch
from torch import Tensor

from kimi_k2.engine.batch import new_cache
from kimi_k2.engine.decode_step import DecodeStep, capturable
from kimi_k2.engine.draft_length import DraftLength, DraftStats, step_cost
from kimi_k2.engine.drafters import Drafter
from kimi_k2.engine.layer_step import LayerStep, Reduce, alone
from kimi_k2.engine.prompt_step import Media, PromptStep
from kimi_k2.engine.sampler import Sampler, SamplingParams, Step, Steps, check_finite
from kimi_k2.engine.speculate import PromptReader, ended, speculative_steps
from kimi_k2.engine.vision import MediaRows
from kimi_k2.errors import GenerationError
from kimi_k2.model.cache import LatentCache
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.model.turns import TIMEOUT, checked_timeout

# Slots of a kept cache come in this many: a slightly longer generation finds its graph again.
SLOTS = 1024
# Tokens of all sequences in a chunk of their prompts, if nothing else is asked for: what a chunk's intermediate values
# take of memory is bounded, and the experts are as fast as with more.
CHUNK = 16384


class Read(Protocol):
    """Runs a chunk of prompts."""

    def __call__(self, ids: Tensor, positions: Tensor, last: Tensor, media: Media | None = None) -> Tensor:
        """Tokens and positions (negative: padding), int64 [B, S], to logits [B, vocab_size] of a column of each."""
        ...


def prompt_lengths(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Tokens of each prompt; GenerationError without a prompt, or if one is empty."""
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) == 0:
        raise GenerationError("expected at least one prompt, each with at least one token")
    return lengths


def prefill(
    model: KimiK2ForCausalLM,
    prompts: Sequence[Sequence[int]],
    cache: LatentCache,
    chunk_size: int | None = None,
    media: MediaRows | None = None,
    read: Read | None = None,
    cached: int = 0,
) -> Tensor:
    """Run prompts of any lengths through the model, filling the cache.

    Args:
        model: plain model, or a rank's part of it.
        prompts: token ids, at least one a prompt.
        cache: with room for the longest prompt.
        chunk_size: tokens a sequence and forward pass; None for the whole prompt at once.
        media: embeddings of the prompts' images and videos.
        read: runs a chunk with `cache`; its tokens, positions and columns lie on the CPU. None is the plain model.
        cached: first tokens of every prompt that the cache holds already; fewer than the shortest prompt's.

    Returns:
        Logits of each prompt's last token, [B, vocab_size].

    Raises:
        GenerationError: a prompt is empty or longer than the cache, all of one is cached, chunk_size is below 1, or
            there are media in batch-invariant mode.
    """
    lengths = prompt_lengths(prompts)
    if not 0 <= cached < min(lengths):
        raise GenerationError(f"cached: expected fewer tokens than the shortest prompt's {min(lengths)}, got {cached}")
    if chunk_size is not None and chunk_size < 1:
        raise GenerationError(f"chunk_size: expected at least 1, got {chunk_size}")
    if media is not None and model.batch_invariant:
        raise GenerationError("images and videos are encoded side by side: batch-invariant mode takes text alone")
    device = model.lm_head.weight.device
    longest = max(lengths)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.as_tensor(prompt, dtype=torch.int64)
    index = None
    if media is not None:
        index = media.padded(longest)
        ids[index >= 0] = 0  # a video's token may lie outside the vocabulary
    last = torch.tensor(lengths) - 1
    columns = torch.arange(longest).expand_as(ids)
    positions = torch.where(columns <= last[:, None], columns, -1)
    result: Tensor | None = None
    read, step = read or partial(_read_plainly, model, cache), chunk_size or longest
    for start in range(cached, longest, step):
        chunk = slice(start, start + step)
        at = (last - start).clamp(0, min(step, longest - start) - 1)
        chunk_media = None
        if media is not None and index is not None and bool((index[:, chunk] >= 0).any()):
            chunk_media = (index[:, chunk].to(device), media.features)
        logits = read(ids[:, chunk], positions[:, chunk], at, chunk_media)
        if result is None:
            result = torch.empty_like(logits)
        ended = ((last >= start) & (last < start + step)).to(device)
        result[ended] = logits[ended]
    assert result is not None
    return result


def _read_plainly(
    model: KimiK2ForCausalLM, cache: LatentCache, ids: Tensor, positions: Tensor, last: Tensor, media: Media | None
) -> Tensor:
    device = model.lm_head.weight.device
    logits: Tensor = model(ids.to(device), positions.to(device), cache, logits_at=last.to(device), media=media)
    return logits


def sequence_slots(prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[int]:
    """Cache slots that a generation fills of each sequence; GenerationError if a prompt is empty."""
    return [length + params.max_new_tokens - 1 for length in prompt_lengths(prompts)]


def slots_needed(model: KimiK2ForCausalLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> int:
    """Cache slots a sequence that a generation fills.

    Raises:
        GenerationError: a prompt is empty, or more than max_position_embeddings are needed.
    """
    needed = max(sequence_slots(prompts, params))
    longest = needed - params.max_new_tokens + 1
    if needed > model.config.max_position_embeddings:
        raise GenerationError(
            f"prompt of {longest} and {params.max_new_tokens} new tokens exceed max_position_embeddings "
            f"({model.config.max_position_embeddings})"
        )
    return needed


class Generator:
    """Generations of one model, one after another: an open stream holds the model, other callers wait.

    Args:
        model: whole, or a rank's part, whose ranks must make the same calls, in one order: from the main thread alone.
        reduce, gather: see DecodeStep.
        keep: a prompt that begins as the one before and its reply did, as a chat's next turn does, is read from where
            they part; for one sequence of text at a time, and not in batch-invariant mode, as decode steps wrote the
            reply's part of the cache.
        drafter: proposes tokens, which are then verified several at a time; what is generated stays the same, greedily
            token for token, sampled in its distribution. None decodes token by token.
        draft_tokens: tokens that are drafted at most, at least 1.
        adaptive: draft fewer, or none, where that pays by `DraftLength`; None on a GPU alone. A sampled sequence then
            depends on what else is in the batch, in its random choices though not in its distribution.

    Raises:
        GenerationError: draft_tokens is below 1.

    Attributes:
        prompt: reads prompts into the cache that `prepare` gave last.
        stats: of the last generation's drafts.
    """

    def __init__(
        self,
        model: KimiK2ForCausalLM,
        *,
        reduce: Reduce = alone,
        gather: Reduce = alone,
        keep: bool = False,
        drafter: Drafter | None = None,
        draft_tokens: int = 3,
        adaptive: bool | None = None,
    ) -> None:
        if draft_tokens < 1:
            raise GenerationError(f"draft_tokens: expected at least 1, got {draft_tokens}")
        self.model, self.reduce, self.gather, self.keep = model, reduce, gather, keep
        self.drafter, self.draft_tokens, self.adaptive = drafter, draft_tokens, adaptive
        self.stats = DraftStats()
        self._kept: tuple[LatentCache, list[int]] | None = None  # and the tokens that it holds
        self._step: DecodeStep | None = None
        self._modes: tuple[torch.dtype | None, bool] | None = None  # of the model, when the cache was made
        self.prompt: PromptStep | None = None
        self._layers: list[LayerStep] | None = None

    def prepare(self, batch: int, length: int, slots: Sequence[int] | None = None) -> tuple[LatentCache, DecodeStep]:
        """A cache with `length` slots a sequence or more, and what decodes with it.

        Args:
            slots: what each sequence fills, at most `length`; None is `length`.

        Raises:
            BusyError: a stream of the model is open.
        """
        with self.model.turns.take():
            return self._prepare(batch, length, slots)

    def _prepare(self, batch: int, length: int, slots: Sequence[int] | None) -> tuple[LatentCache, DecodeStep]:
        step, modes = self._step, (self.model.kv_cache_dtype, self.model.batch_invariant)
        if step is not None and modes == self._modes and step.cache.fits(slots or [length] * batch):
            step.cache.assign(slots or [length] * batch)
            return step.cache, step
        step = None  # its memory goes before the next one's comes
        self._close()
        self._modes = modes
        kept = capturable(self.model, batch)
        paged = kept and self.drafter is not None  # kernels take a block table of pages alone
        cache = new_cache(self.model, batch, length, slots, SLOTS if kept else 1, paged=paged)
        # On a GPU kernels may have put the weights into another order since the last layers were made.
        layers = None if cache.data.is_cuda else self._layers
        options: dict[str, Any] = {"reduce": self.reduce, "gather": self.gather, "layers": layers}
        options["aux_layers"] = () if self.drafter is None else self.drafter.aux_layers
        step = self._step = DecodeStep(self.model, cache, graph=kept and cache.data.is_cuda, **options)
        self.prompt, self._layers = PromptStep(step), step.layers
        if kept and self.drafter is None:
            # Captured now, not in the first timed step; what this writes to slot 0 the prefill overwrites.
            now = torch.zeros(batch, dtype=torch.int64, device=cache.data.device)
            step(now, now)
        return cache, step

    def close(self) -> None:
        """Give the cache and its graphs up; the next generation makes them anew.

        Raises:
            BusyError: a stream of the model is open.
        """
        with self.model.turns.take():
            self._close()

    def _close(self) -> None:
        if self.prompt is not None:
            self.prompt.close()
        for user in (self.drafter, self._step):
            if user is not None:
                user.close()
        self._step = self.prompt = None

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        chunk_size: int | None = None,
        media: Callable[[], MediaRows | None] | None = None,
        timeout: float = TIMEOUT,
    ) -> Steps:
        """Generate step by step; the first step contains the prefill.

        The stream holds the model from its first `next` until it ends, fails, is closed or has no reference left, on
        whatever threads. Others wait, first come, first served.

        Args:
            prompts: token ids a sequence; lengths may differ.
            params: how tokens are chosen, and when a sequence ends.
            chunk_size: see `prefill`; None bounds a chunk's memory.
            media: gives embeddings of the prompts' images and videos, once the model is held.
            timeout: seconds to wait at most for other callers' streams.

        Raises:
            GenerationError: a prompt is empty; prompt and new tokens exceed max_position_embeddings; the prompt's
                logits are not finite; ranks are asked by another thread than the main one.
            BusyError: (at the first `next`) others' streams were open for all of the timeout, or this thread's own is.
        """
        slots_needed(self.model, prompts, params)
        begin = partial(self._steps, prompts, params, chunk_size, media)
        return self.model.turns.stream(begin, checked_timeout(timeout))

    def _steps(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        chunk_size: int | None,
        encode: Callable[[], MediaRows | None] | None,
    ) -> Iterator[Step]:
        """The steps, of a model that is held."""
        if self.reduce is not alone and threading.current_thread() is not threading.main_thread():
            raise GenerationError("ranks make the same calls in the same order: from each process's main thread alone")
        media, needed = None if encode is None else encode(), slots_needed(self.model, prompts, params)
        kept, self._kept = self._kept, None  # an abandoned generation leaves nothing that is known
        if self.keep:
            needed = min(-(-needed // SLOTS) * SLOTS, self.model.config.max_position_embeddings)
        cache, decode = self._prepare(len(prompts), needed, sequence_slots(prompts, params))
        cached, single = 0, len(prompts) == 1 and media is None
        if kept is not None and cache is kept[0] and single and not self.model.batch_invariant:
            pairs = zip(kept[1], prompts[0][:-1], strict=False)
            cached = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        assert self.prompt is not None
        sampler, read = Sampler(params, prompts), self.prompt
        chunk_size = max(1, CHUNK // len(prompts)) if chunk_size is None else chunk_size

        def first(read: Read) -> Tensor:
            logits = prefill(self.model, prompts, cache, chunk_size, media, read, cached)
            check_finite(logits)
            return sampler(logits)

        if self.drafter is not None:
            self.drafter.start(cache, prompts)
            reader = PromptReader(read, self.drafter, prompts, self.model.config.vocab_size)
            steps = self._speculate(prompts, self.drafter, decode, sampler, lambda: (first(reader), reader.aux))
        else:
            steps = token_steps(
                [len(prompt) for prompt in prompts],
                params,
                partial(first, read),
                lambda tokens, positions: sampler(decode(tokens, positions)),
            )
            if params.logprobs is not None:
                steps = (replace(step, logprobs=sampler.logprobs) for step in steps)
        return self._noted(cache, prompts[0], steps) if self.keep and single else steps

    def _speculate(
        self,
        prompts: Sequence[Sequence[int]],
        drafter: Drafter,
        step: DecodeStep,
        sampler: Sampler,
        begin: Callable[[], tuple[Tensor, Tensor | None]],
    ) -> Iterator[Step]:
        """Steps of drafted and verified tokens."""
        self.stats = DraftStats()
        adaptive = self.model.lm_head.weight.is_cuda if self.adaptive is None else self.adaptive
        cost = step_cost(self.model.config) if adaptive else None
        length = DraftLength(self.draft_tokens, cost, drafter.cost)
        return speculative_steps(prompts, sampler, begin, step.verify, drafter, length, self.stats)

    def _noted(self, cache: LatentCache, prompt: Sequence[int], steps: Iterator[Step]) -> Iterator[Step]:
        """The steps; behind each the cache holds all tokens but the newest."""
        cached = list(prompt)
        for step in steps:
            self._kept = cache, list(cached)
            cached += [token for token in step.tokens if token is not None]
            yield step


def token_steps(
    lengths: Sequence[int],
    params: SamplingParams,
    begin: Callable[[], Tensor],
    advance: Callable[[Tensor, Tensor], Tensor],
) -> Iterator[Step]:
    """The loop of a generation, whoever computes and chooses the tokens.

    Args:
        lengths: tokens of each prompt.
        params: when a sequence ends.
        begin: runs the prompts; the first new token of each, int64 [B].
        advance: the next tokens from these at their positions, int64 [B] each.
    """
    start = time.perf_counter()
    tokens = begin()
    positions = torch.tensor(lengths, device=tokens.device)
    running = [True] * len(lengths)
    moves = torch.ones_like(positions)
    for step in range(params.max_new_tokens):
        if step:
            start = time.perf_counter()
            tokens = advance(tokens, positions)
            positions = positions + moves
        values = tokens.tolist()
        yield Step(
            tuple(value if alive else None for value, alive in zip(values, running, strict=True)),
            time.perf_counter() - start,
        )
        going_on = [alive and not ended([value], params) for value, alive in zip(values, running, strict=True)]
        if going_on != running:
            # An ended sequence stays where it is: its row goes on being computed, and is ignored.
            running, moves = going_on, torch.tensor(going_on, device=tokens.device)
        if not any(running):
            return


def generate(
    model: KimiK2ForCausalLM, prompts: Sequence[Sequence[int]], params: SamplingParams, **options: Any
) -> list[list[int]]:
    """Each prompt's new tokens, the ending one included; options and errors as for `Generator.stream`."""
    replies: list[list[int]] = [[] for _ in prompts]
    for step in Generator(model).stream(prompts, params, **options):
        for reply, token in zip(replies, step.tokens, strict=True):
            if token is not None:
                reply.append(token)
    return replies
