"""The loop of a generation whose tokens are drafted, verified several at a time, and kept where they are the target's.

What is generated is what the target generates: greedily the same tokens, sampled the same distribution, whatever the
drafts are (`engine.rejection`).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from kimi_k2.engine.draft_length import DraftLength, DraftStats
from kimi_k2.engine.drafters import Accepted, Choose, Drafter
from kimi_k2.engine.prompt_step import Media, PromptStep
from kimi_k2.engine.rejection import draw, verify
from kimi_k2.engine.sampler import Sampler, SamplingParams, TokenLogprobs, token_logprobs
from kimi_k2.engine.step import Step
from kimi_k2.errors import KimiK2Warning

# A head with less of its first tokens accepted, of so many, is most likely another model's.
FEW, OF = 0.05, 100

Verify = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]


class PromptReader:
    """Reads prompts for the target and lets a drafter read them too, a chunk after the other.

    Args:
        step: reads a chunk.
        drafter: of the generation.
        prompts: token ids of each sequence.
        vocabulary: tokens from which on stand for images and are none of the embedding's.

    Attributes:
        aux: hidden states [B, 1, layers * H] of each prompt's last token, once it was read; None without such.
    """

    def __init__(self, step: PromptStep, drafter: Drafter, prompts: Sequence[Sequence[int]], vocabulary: int) -> None:
        self.step, self.drafter = step, drafter
        self.aux: Tensor | None = None
        self._lengths = torch.tensor([len(prompt) for prompt in prompts])[:, None]
        self._ids = torch.zeros(len(prompts), int(self._lengths.max()) + 1, dtype=torch.int64)
        for row, prompt in zip(self._ids, prompts, strict=True):
            row[: len(prompt)] = torch.as_tensor(prompt, dtype=torch.int64)
        self._ids[self._ids >= vocabulary] = 0

    def __call__(self, ids: Tensor, positions: Tensor, last: Tensor, media: Media | None = None) -> Tensor:
        """As `PromptStep`; arguments on the CPU."""
        logits, aux = self.step(ids, positions, last, media), self.step.aux
        known = (positions >= 0) & (positions + 1 < self._lengths)
        following = self._ids.gather(1, positions.clamp(min=0) + 1)
        self.drafter.read(following, torch.where(known, positions, -1), aux)
        if aux is not None:
            if self.aux is None:
                self.aux = aux.new_zeros(len(aux), 1, aux.shape[2])
            rows, columns = torch.where(positions + 1 == self._lengths)
            self.aux[rows, 0] = aux[rows, columns]
        return logits


def speculative_steps(
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    begin: Callable[[], tuple[Tensor, Tensor | None]],
    verifies: Verify,
    drafter: Drafter,
    length: DraftLength,
    stats: DraftStats,
) -> Iterator[Step]:
    """Steps of one token a sequence at most, several of one verification after another.

    Args:
        prompts: token ids of each sequence.
        sampler: of the generation; its params say when a sequence ends.
        begin: runs the prompts; the first new token of each, int64 [B], and `PromptReader.aux`.
        verifies: as `VerifyStep`.
        drafter: has read the prompts when `begin` returns.
        length: how many tokens to draft.
        stats: are added to.
    """
    params, began = sampler.params, time.perf_counter()
    first, aux = begin()
    device = first.device
    new = [[token] for token in first.tolist()]
    yield Step(tuple(own[0] for own in new), time.perf_counter() - began, sampler.logprobs)
    starts = [len(prompt) - 1 for prompt in prompts]  # of the last token whose hidden state is known
    made = [1] * len(new)
    running = [params.max_new_tokens > 1 and not _ended(own, sampler) for own in new]
    while any(running):
        began = time.perf_counter()
        most = length.choose(sum(running))
        room = [params.max_new_tokens - 1 - count for count in made]
        wanted = [min(most, left) if alive else 0 for left, alive in zip(room, running, strict=True)]
        kept = [own if alive else [] for own, alive in zip(new, running, strict=True)]
        proposal = drafter.propose(Accepted(kept, starts, aux), wanted, _chooser(sampler, wanted))
        width = proposal.tokens.shape[1] + 1
        starts = [start + len(own) for start, own in zip(starts, kept, strict=True)]
        tokens, positions = torch.zeros(len(new), width, dtype=torch.int64), torch.full((len(new), width), -1)
        for row, (own, start, count) in enumerate(zip(kept, starts, proposal.counts, strict=True)):
            if own:
                tokens[row, 0] = own[-1]
                positions[row, : count + 1] = torch.arange(start, start + count + 1)
        tokens = tokens.to(device)
        tokens[:, 1:] = proposal.tokens
        logits, aux = verifies(tokens, positions.to(device))
        taken = verify(sampler, logits, proposal, running)
        for row, (found, count) in enumerate(zip(taken, proposal.counts, strict=True)):
            if running[row]:
                length.observe(count, len(found) - 1)
                whole = up_to_end(found, sampler.params)
                stats.add(count, len(found) - 1, len(whole))
                made[row] += len(whole)
                running[row] = made[row] < params.max_new_tokens and not _ended(whole, sampler)
                taken[row] = whole
        _warn(drafter, stats)
        sampler.count(taken)
        new = taken
        yield from steps_of(taken, time.perf_counter() - began, _logprobs(logits, taken, params.logprobs))


def _ended(tokens: Sequence[int], sampler: Sampler) -> bool:
    params = sampler.params
    return not params.ignore_eos and bool(tokens) and tokens[-1] in params.eos_token_ids


def up_to_end(tokens: list[int], params: SamplingParams) -> list[int]:
    """Up to the first token that ends the sequence."""
    if params.ignore_eos:
        return tokens
    ends = (place for place, token in enumerate(tokens) if token in params.eos_token_ids)
    return tokens[: next(ends, len(tokens)) + 1]


def _chooser(sampler: Sampler, wanted: Sequence[int]) -> Choose:
    """How drafted tokens are chosen: as the target's are, without penalties, which a draft does not follow."""
    if sampler.params.temperature == 0:
        return lambda logits, place: (logits.argmax(dim=-1), None)

    def drawn(logits: Tensor, place: int) -> tuple[Tensor, Tensor | None]:
        probabilities = sampler.probabilities(logits.float())
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        uniform = torch.zeros(len(wanted), dtype=torch.float64)
        for row, count in enumerate(wanted):
            if place < count:
                uniform[row] = torch.rand((), dtype=torch.float64, generator=sampler.generators[row])
        return draw(probabilities, uniform.to(logits.device)), probabilities

    return drawn


def _logprobs(logits: Tensor, taken: list[list[int]], count: int | None) -> list[tuple[TokenLogprobs, ...]]:
    if count is None:
        return []
    places = range(max(map(len, taken)))
    rows = [torch.tensor([own[place] if place < len(own) else 0 for own in taken]) for place in places]
    return [token_logprobs(logits[:, place], row.to(logits.device), count) for place, row in enumerate(rows)]


def steps_of(
    taken: Sequence[Sequence[int]], seconds: float, logprobs: Sequence[tuple[TokenLogprobs, ...]] = ()
) -> Iterator[Step]:
    """Tokens of each sequence as steps, one for each place; the first has the seconds, as the tokens come together."""
    for place in range(max(map(len, taken))):
        tokens = tuple(own[place] if place < len(own) else None for own in taken)
        yield Step(tokens, 0.0 if place else seconds, logprobs[place] if logprobs else ())


def _warn(drafter: Drafter, stats: DraftStats) -> None:
    """Say once that a head's drafts are as good as never accepted."""
    if drafter.aux_layers and stats.drafted and stats.drafted[0] >= OF and not stats.warned:
        stats.warned = True
        if stats.rates[0] < FEW:
            warnings.warn(
                f"{stats.accepted[0]} of {stats.drafted[0]} first drafted tokens were accepted: the head is most"
                " likely another model's, and slows this one down",
                KimiK2Warning,
                stacklevel=3,
            )
