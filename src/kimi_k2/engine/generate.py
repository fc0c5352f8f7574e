"""Generation with the plain model: prefill, decode, sampling, and the time of every step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from kimi_k2.engine.media_rows import MediaRows
from kimi_k2.engine.sampler import Sampler, SamplingParams, TokenLogprobs, check_finite
from kimi_k2.errors import GenerationError
from kimi_k2.model.cache import LatentCache
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.ops.registry import batch_invariant

# Tokens int64 [B] at positions int64 [B] to logits [B, vocab_size].
Decode = Callable[[Tensor, Tensor], Tensor]
# Tokens and positions (negative: padding), int64 [B, S], to logits [B, vocab_size] of a column a sequence, int64 [B].
Read = Callable[[Tensor, Tensor, Tensor], Tensor]


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
        read: runs a chunk without media, with `cache`; its arguments lie on the CPU. None is the model itself.
        cached: first tokens of every prompt that the cache holds already; fewer than the shortest prompt's.

    Returns:
        Logits of each prompt's last token, [B, vocab_size].

    Raises:
        GenerationError: a prompt is empty or longer than the cache, chunk_size is below 1, or there are media in
            batch-invariant mode.
    """
    lengths = prompt_lengths(prompts)
    if chunk_size is not None and chunk_size < 1:
        raise GenerationError(f"chunk_size: expected at least 1, got {chunk_size}")
    if media is not None and batch_invariant():
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
    step = chunk_size or longest
    for start in range(cached, longest, step):
        chunk = slice(start, start + step)
        at = (last - start).clamp(0, min(step, longest - start) - 1)
        part = None
        if media is not None and index is not None and bool((index[:, chunk] >= 0).any()):
            part = (index[:, chunk].to(device), media.features)
        if read is not None and part is None:
            logits = read(ids[:, chunk], positions[:, chunk], at)
        else:
            logits = model(
                ids[:, chunk].to(device), positions[:, chunk].to(device), cache, logits_at=at.to(device), media=part
            )
        if result is None:
            result = torch.empty_like(logits)
        ended = ((last >= start) & (last < start + step)).to(device)
        result[ended] = logits[ended]
    assert result is not None
    return result


def decode_step(model: KimiK2ForCausalLM, tokens: Tensor, positions: Tensor, cache: LatentCache) -> Tensor:
    """One token a sequence, each at its own position: int64 [B], int64 [B] to logits [B, vocab_size]."""
    logits: Tensor = model(tokens[:, None], positions[:, None], cache)
    return logits[:, 0]


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


@dataclass(frozen=True)
class Step:
    """What one step produced: a token for each sequence still running (None for ended ones), and its seconds.

    With `SamplingParams.logprobs` also log-probabilities, of each sequence.
    """

    tokens: tuple[int | None, ...]
    seconds: float
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass
class GenerationOutput:
    """Generated tokens with their timing.

    Attributes:
        token_ids: new tokens of each sequence, the ending one included.
        finish_reasons: `stop` (an end token) or `length`, a sequence.
        ttft: seconds from the call to the first token (prefill and first choice).
        itl: seconds of every later step.
    """

    token_ids: list[list[int]]
    finish_reasons: list[str]
    ttft: float
    itl: list[float] = field(default_factory=list)

    @property
    def tpot(self) -> float:
        """Mean seconds an output token after the first; NaN if there was only one."""
        return sum(self.itl) / len(self.itl) if self.itl else float("nan")


def stream(
    model: KimiK2ForCausalLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    chunk_size: int | None = None,
    cache: LatentCache | None = None,
    decode: Decode | None = None,
    media: MediaRows | None = None,
    read: Read | None = None,
    cached: int = 0,
) -> Iterator[Step]:
    """Generate step by step; the first step contains the prefill.

    Args:
        model: plain model, or a rank's part of it.
        prompts: token ids a sequence; lengths may differ.
        params: how tokens are chosen, and when a sequence ends.
        chunk_size: see `prefill`.
        cache: to use, whose entries are overwritten; None makes one that just fits.
        decode: makes a step's logits with `cache`, which must then be given; None is `decode_step`.
        media: embeddings of the prompts' images and videos.
        read, cached: as `prefill` takes them.

    Raises:
        GenerationError: a prompt is empty; prompt and new tokens exceed max_position_embeddings or `cache`; `decode`
            without `cache`; the prompt's logits are not finite.
    """
    needed = slots_needed(model, prompts, params)
    if cache is None and decode is not None:
        raise GenerationError("decode needs the cache that it reads")
    if cache is not None and cache.max_length < needed:
        raise GenerationError(f"prompt and new tokens need {needed} slots, the cache has {cache.max_length}")
    start = time.perf_counter()
    if cache is None:
        cache = model.new_cache(len(prompts), needed)
    if decode is None:
        decode = partial(decode_step, model, cache=cache)
    sampler, chosen, at = Sampler(params, prompts), cache, decode

    def first() -> Tensor:
        logits = prefill(model, prompts, chosen, chunk_size, media, read, cached)
        check_finite(logits)
        return sampler(logits)

    steps = token_steps(
        [len(prompt) for prompt in prompts],
        params,
        first,
        lambda tokens, positions: sampler(at(tokens, positions)),
        start,
    )
    yield from steps if params.logprobs is None else (replace(step, logprobs=sampler.logprobs) for step in steps)


def token_steps(
    lengths: Sequence[int],
    params: SamplingParams,
    begin: Callable[[], Tensor],
    advance: Callable[[Tensor, Tensor], Tensor],
    start: float | None = None,
) -> Iterator[Step]:
    """The loop of a generation, whoever computes and chooses the tokens.

    Args:
        lengths: tokens of each prompt.
        params: when a sequence ends.
        begin: runs the prompts; the first new token of each, int64 [B].
        advance: the next tokens from these at their positions, int64 [B] each.
        start: when the first step began, by `time.perf_counter`; None is now.
    """
    start = time.perf_counter() if start is None else start
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
        if not params.ignore_eos and any(value in params.eos_token_ids for value in values):
            running = [
                alive and value not in params.eos_token_ids for value, alive in zip(values, running, strict=True)
            ]
            # An ended sequence stays where it is: its row goes on being computed, and is ignored.
            moves = torch.tensor(running, device=tokens.device)
        if not any(running):
            return


def generate(
    model: KimiK2ForCausalLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    chunk_size: int | None = None,
    media: MediaRows | None = None,
) -> GenerationOutput:
    """Generate until every sequence has ended; arguments and errors as for `stream`."""
    token_ids: list[list[int]] = [[] for _ in prompts]
    seconds = []
    for step in stream(model, prompts, params, chunk_size=chunk_size, media=media):
        seconds.append(step.seconds)
        for sequence, token in zip(token_ids, step.tokens, strict=True):
            if token is not None:
                sequence.append(token)
    reasons = [
        "stop" if not params.ignore_eos and sequence[-1] in params.eos_token_ids else "length" for sequence in token_ids
    ]
    return GenerationOutput(token_ids, reasons, seconds[0], seconds[1:])
