"""Generation with the plain model: prefill, decode, sampling, and the time of every step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError, GenerationError
from kimi_k2.model.cache import LatentCache
from kimi_k2.model.decoder import KimiK2ForCausalLM

# <|im_end|> of the real vocabulary ends a turn in every chat model of the family, whatever config.json says.
IM_END = 163586
# Tokens int64 [B] at positions int64 [B] to logits [B, vocab_size].
Decode = Callable[[Tensor, Tensor], Tensor]
REAL_VOCAB_SIZE = 163840


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens; names and meanings as in vLLM and Hugging Face.

    Attributes:
        max_new_tokens: tokens to generate at most, a sequence.
        temperature: 0 is greedy.
        top_p: keep the smallest set of tokens whose probability reaches this.
        top_k: keep this many tokens; 0 keeps all.
        seed: of the random choice; sequence i of a batch uses its own generator, seeded seed + i.
        eos_token_ids: tokens that end a sequence; they are returned as its last token.
        ignore_eos: generate max_new_tokens in any case (for benchmarks).

    Raises:
        GenerationError: a value is out of range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, valid, expected in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < float("inf"), "a finite number, at least 0"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, "at least 0 (0 keeps all)"),
        ):
            if not valid:
                raise GenerationError(f"{name}: expected {expected}, got {getattr(self, name)!r}")


def load_eos_token_ids(directory: str | Path, config: KimiK2Config) -> frozenset[int]:
    """Tokens that end generation: from generation_config.json, else config.json, and <|im_end|> in any case.

    Raises:
        ConfigError: generation_config.json is not JSON or its `eos_token_id` is no token id.
    """
    path = Path(directory) / "generation_config.json"
    eos: object = config.eos_token_id
    if path.is_file():
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"not valid JSON: {error}", file=path) from None
        if not isinstance(raw, dict):
            raise ConfigError("expected a JSON object", file=path)
        eos = raw.get("eos_token_id", eos)
    listed = [] if eos is None else list(eos) if isinstance(eos, list) else [eos]
    ids: list[int] = []
    for token in listed:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < config.vocab_size:
            raise ConfigError(
                f"expected token ids below {config.vocab_size}, got {token!r}", field="eos_token_id", file=path
            )
        ids.append(token)
    if config.vocab_size == REAL_VOCAB_SIZE:
        ids.append(IM_END)
    return frozenset(ids)


class Sampler:
    """Chooses the next token of each sequence, reproducibly whatever else is in the batch."""

    def __init__(self, params: SamplingParams, batch: int) -> None:
        self.params = params
        self.generators = [torch.Generator().manual_seed(params.seed + i) for i in range(batch)]

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits [B, vocab_size] to token ids int64 [B]."""
        if self.params.temperature == 0:
            return logits.argmax(dim=-1)
        probabilities = self._probabilities(logits.float().cpu())
        rows = zip(probabilities, self.generators, strict=True)
        drawn = [torch.multinomial(row, 1, generator=generator) for row, generator in rows]
        return torch.cat(drawn).to(logits.device)

    def _probabilities(self, logits: Tensor) -> Tensor:
        logits = logits / self.params.temperature
        if self.params.top_k and self.params.top_k < logits.shape[-1]:
            threshold = logits.topk(self.params.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < threshold, float("-inf"))
        probabilities = logits.softmax(dim=-1)
        if self.params.top_p < 1:
            ordered, order = probabilities.sort(dim=-1, descending=True)
            # A token stays if the mass before it is still below top_p, so the first one always stays.
            ordered = ordered.masked_fill(ordered.cumsum(dim=-1) - ordered >= self.params.top_p, 0)
            probabilities = torch.zeros_like(probabilities).scatter_(-1, order, ordered)
        return probabilities


def prompt_lengths(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Tokens of each prompt; GenerationError without a prompt, or if one is empty."""
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) == 0:
        raise GenerationError("expected at least one prompt, each with at least one token")
    return lengths


def prefill(
    model: KimiK2ForCausalLM, prompts: Sequence[Sequence[int]], cache: LatentCache, chunk_size: int | None = None
) -> Tensor:
    """Run prompts of any lengths through the model, filling the cache.

    Args:
        prompts: token ids, at least one a prompt.
        cache: with room for the longest prompt.
        chunk_size: tokens a sequence and forward pass; None for the whole prompt at once.

    Returns:
        Logits of each prompt's last token, [B, vocab_size].

    Raises:
        GenerationError: a prompt is empty or longer than the cache, or chunk_size is below 1.
    """
    lengths = prompt_lengths(prompts)
    if chunk_size is not None and chunk_size < 1:
        raise GenerationError(f"chunk_size: expected at least 1, got {chunk_size}")
    device = model.lm_head.weight.device
    longest = max(lengths)
    ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.as_tensor(prompt, dtype=torch.int64)
    last = torch.tensor(lengths) - 1
    columns = torch.arange(longest).expand_as(ids)
    positions = torch.where(columns <= last[:, None], columns, -1)
    result: Tensor | None = None
    step = chunk_size or longest
    for start in range(0, longest, step):
        chunk = slice(start, start + step)
        at = (last - start).clamp(0, min(step, longest - start) - 1)
        logits = model(ids[:, chunk].to(device), positions[:, chunk].to(device), cache, logits_at=at.to(device))
        if result is None:
            result = torch.empty_like(logits)
        ended = ((last >= start) & (last < start + step)).to(device)
        result[ended] = logits[ended]
    assert result is not None
    return result


def decode_step(model: KimiK2ForCausalLM, tokens: Tensor, positions: Tensor, cache: LatentCache) -> Tensor:
    """One token a sequence, each at its own position: int64 [B], int64 [B] to logits [B, vocab_size]."""
    return model(tokens[:, None], positions[:, None], cache)[:, 0]


def slots_needed(model: KimiK2ForCausalLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> int:
    """Cache slots a sequence that a generation fills.

    Raises:
        GenerationError: a prompt is empty, or more than max_position_embeddings are needed.
    """
    longest = max(prompt_lengths(prompts))
    needed = longest + params.max_new_tokens - 1
    if needed > model.config.max_position_embeddings:
        raise GenerationError(
            f"prompt of {longest} and {params.max_new_tokens} new tokens exceed max_position_embeddings "
            f"({model.config.max_position_embeddings})"
        )
    return needed


@dataclass(frozen=True)
class Step:
    """What one step produced: a token for each sequence still running (None for ended ones), and its seconds."""

    tokens: tuple[int | None, ...]
    seconds: float


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
) -> Iterator[Step]:
    """Generate step by step; the first step contains the prefill.

    Args:
        prompts: token ids a sequence; lengths may differ.
        chunk_size: see `prefill`.
        cache: to use, whose entries are overwritten; None makes one that just fits.
        decode: makes a step's logits with `cache`, which must then be given; None is `decode_step`.

    Raises:
        GenerationError: a prompt is empty; prompt and new tokens exceed max_position_embeddings or `cache`; `decode`
            without `cache`.
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
    sampler = Sampler(params, len(prompts))
    tokens = sampler(prefill(model, prompts, cache, chunk_size))
    positions = torch.tensor([len(prompt) for prompt in prompts], device=tokens.device)
    running = [True] * len(prompts)
    advance = torch.ones_like(positions)
    for step in range(params.max_new_tokens):
        if step:
            start = time.perf_counter()
            tokens = sampler(decode(tokens, positions))
            positions = positions + advance
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
            advance = torch.tensor(running, device=tokens.device)
        if not any(running):
            return


def generate(
    model: KimiK2ForCausalLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    chunk_size: int | None = None,
) -> GenerationOutput:
    """Generate until every sequence has ended; arguments and errors as for `stream`."""
    token_ids: list[list[int]] = [[] for _ in prompts]
    seconds = []
    for step in stream(model, prompts, params, chunk_size=chunk_size):
        seconds.append(step.seconds)
        for sequence, token in zip(token_ids, step.tokens, strict=True):
            if token is not None:
                sequence.append(token)
    reasons = [
        "stop" if not params.ignore_eos and sequence[-1] in params.eos_token_ids else "length" for sequence in token_ids
    ]
    return GenerationOutput(token_ids, reasons, seconds[0], seconds[1:])
