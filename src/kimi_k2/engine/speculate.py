"""The loop of a generation whose tokens are drafted, verified several at a time, and kept where they are the target's.

What is generated is what the target generates: greedily the same tokens, sampled the same distribution, whatever the
drafts are (`engine.sampler.verify`).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_k2.engine.draft_length import PAUSE, DraftLength, DraftStats
from kimi_k2.engine.drafters import Accepted, Choose, Drafter
from kimi_k2.engine.prompt_step import Media, PromptStep
from kimi_k2.engine.sampler import Sampler, SamplingParams, Step, TokenLogprobs, draw, token_logprobs, verify
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
        verifies: as `DecodeStep.verify`.
        drafter: has read the prompts when `begin` returns.
        length: how many tokens to draft.
        stats: are added to.
    """
    began = time.perf_counter()
    first, aux = begin()
    new = [[token] for token in first.tolist()]
    yield from steps_of(new, time.perf_counter() - began, [sampler.logprobs])
    sequences = _Sequences(prompts, sampler, verifies, drafter, stats, new, aux, first.device)
    while any(sequences.running):
        most = length.choose(sum(sequences.running))
        # The drafter reads what came of its last draft, and then now and then.
        if most or not 0 < sequences.behind < PAUSE:
            yield from sequences.drafted(most, length)
        else:
            yield sequences.plain()


@dataclass
class _Sequences:
    """Where each sequence is.

    Attributes:
        new, aux: as `Accepted`; `aux` of the last step alone.
        behind: steps of a token a sequence that the drafter has not read; 0 where it has not read a verification.
        running: which have not ended.
    """

    prompts: Sequence[Sequence[int]]
    sampler: Sampler
    verifies: Verify
    drafter: Drafter
    stats: DraftStats
    new: list[list[int]]
    aux: Tensor | None
    device: torch.device
    behind: int = 0
    held: Tensor | None = None
    following: tuple[Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        self.starts = [len(prompt) - 1 for prompt in self.prompts]
        self.running = [True] * len(self.new)
        self._stop(self.new)

    def _stop(self, taken: Sequence[Sequence[int]]) -> None:
        """End sequences whose last tokens, which the sampler has counted, end them, or are the last that are wanted."""
        params, counts = self.sampler.params, self.sampler.reply_lengths
        self.running = [
            alive and count < params.max_new_tokens and not ended(own, params)
            for alive, count, own in zip(self.running, counts, taken, strict=True)
        ]

    def _hold(self) -> None:
        """Keep the last step's hidden states, which the next one overwrites, for the drafter."""
        if self.aux is not None:
            if self.held is None:  # of one width, for which a graph is then kept
                self.held = self.aux.new_zeros(len(self.aux), PAUSE, self.aux.shape[2])
            self.held[:, self.behind - 1] = self.aux[:, 0]

    def plain(self) -> Step:
        """A token a sequence, from the last step's where they lie."""
        began = time.perf_counter()
        if self.following is None:
            sequences = list(zip(self.new, self.starts, self.running, strict=True))
            tokens = torch.tensor([[own[-1] if alive else 0] for own, _, alive in sequences]).to(self.device)
            at = torch.tensor([[start + len(own) if alive else -1] for own, start, alive in sequences]).to(self.device)
            self.following = tokens, at
        self._hold()
        tokens, at = self.following
        logits, self.aux = self.verifies(tokens, at)
        tokens, at = self.sampler(logits[:, 0]), torch.where(at < 0, at, at + 1)
        taken = [[token] if alive else [] for token, alive in zip(tokens.tolist(), self.running, strict=True)]
        self._stop(taken)
        for row, own in enumerate(taken):
            self.new[row] += own
            if own and not self.running[row]:
                at[row] = -1
        count = sum(map(len, taken))
        self.stats.steps += count
        self.stats.tokens += count
        self.behind += 1
        self.following = tokens[:, None], at
        return next(steps_of(taken, time.perf_counter() - began, [self.sampler.logprobs]))

    def drafted(self, most: int, length: DraftLength) -> Iterator[Step]:
        """A verification of at most so many tokens."""
        began, sampler, running = time.perf_counter(), self.sampler, self.running
        room = [sampler.params.max_new_tokens - 1 - count for count in sampler.reply_lengths]
        wanted = [min(most, left) if alive else 0 for left, alive in zip(room, running, strict=True)]
        kept = [own if alive else [] for own, alive in zip(self.new, running, strict=True)]
        aux = self.aux
        if self.behind > 1:
            self._hold()
            aux = self.held
        proposal = self.drafter.propose(Accepted(kept, self.starts, aux), wanted, _chooser(sampler, wanted))
        self.starts = [start + len(own) for start, own in zip(self.starts, kept, strict=True)]
        counts = [count if alive else -1 for count, alive in zip(proposal.counts, running, strict=True)]
        columns = torch.arange(proposal.tokens.shape[1] + 1)
        at = torch.tensor(self.starts)[:, None] + columns
        at = torch.where(columns <= torch.tensor(counts)[:, None], at, -1).to(self.device)
        newest = torch.tensor([[own[-1] if own else 0] for own in kept]).to(self.device)
        logits, self.aux = self.verifies(torch.cat((newest, proposal.tokens.to(self.device)), dim=1), at)
        taken = verify(sampler, logits, proposal, running)
        for row, (verified, count) in enumerate(zip(taken, proposal.counts, strict=True)):
            if running[row]:
                length.observe(count, len(verified) - 1)
                taken[row] = up_to_end(verified, sampler.params)
                self.stats.add(count, len(verified) - 1, len(taken[row]))
        _warn(self.drafter, self.stats)
        sampler.count(taken)
        self._stop(taken)
        self.new, self.behind, self.following = taken, int(len(columns) == 1), None
        yield from steps_of(taken, time.perf_counter() - began, _logprobs(logits, taken, sampler.params.logprobs))


def ended(tokens: Sequence[int], params: SamplingParams) -> bool:
    """Whether the last token ends the sequence."""
    return not params.ignore_eos and bool(tokens) and tokens[-1] in params.eos_token_ids


def up_to_end(tokens: list[int], params: SamplingParams) -> list[int]:
    """Up to the first token that ends the sequence."""
    if params.ignore_eos:
        return tokens
    ends = (position for position, token in enumerate(tokens) if token in params.eos_token_ids)
    return tokens[: next(ends, len(tokens)) + 1]


def _chooser(sampler: Sampler, wanted: Sequence[int]) -> Choose:
    """How drafted tokens are chosen: as the target's are, without penalties, which a draft does not follow."""
    if sampler.params.temperature == 0:
        return lambda logits, position: (logits.argmax(dim=-1), None)

    def drawn(logits: Tensor, position: int) -> tuple[Tensor, Tensor | None]:
        probabilities = sampler.probabilities(logits.float())
        probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
        rows = zip(wanted, sampler.generators, strict=True)
        uniform = torch.tensor(
            [generator.random() if position < count else 0.0 for count, generator in rows], dtype=torch.float64
        )
        return draw(probabilities, uniform.to(logits.device)), probabilities

    return drawn


def _logprobs(logits: Tensor, taken: list[list[int]], count: int | None) -> list[tuple[TokenLogprobs, ...]]:
    if count is None:
        return []
    columns = range(max(map(len, taken)))
    rows = [torch.tensor([own[position] if position < len(own) else 0 for own in taken]) for position in columns]
    return [token_logprobs(logits[:, position], row.to(logits.device), count) for position, row in enumerate(rows)]


def steps_of(
    taken: Sequence[Sequence[int]], seconds: float, logprobs: Sequence[tuple[TokenLogprobs, ...]] = ()
) -> Iterator[Step]:
    """Tokens of each sequence as steps, one for each place; the first has the seconds, as the tokens come together."""
    for position in range(max(map(len, taken))):
        tokens = tuple(own[position] if position < len(own) else None for own in taken)
        yield Step(tokens, 0.0 if position else seconds, logprobs[position] if logprobs else ())


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
