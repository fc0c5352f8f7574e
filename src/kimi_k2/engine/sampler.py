"""How the next token is chosen: penalties, then greedy, or drawn with temperature, top-k, top-p and min-p.

Drafted tokens are kept so that what is generated has the target's distribution exactly. Speculative sampling (Leviathan
et al. 2023, arXiv 2211.17192, appendix A): a token x drawn from q is kept with probability min(1, p(x) / q(x)); in the
place of the first that is not, one is drawn from max(0, p - q), normalised. Where a draft names one token, q is 1
there. Greedily a token is kept where it is the likeliest.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from kimi_k2.errors import GenerationError

MIN_TEMPERATURE = 1e-5
MAX_LOGPROBS = 20  # as OpenAI's API
_TYPES = {"int": (int,), "float": (int, float), "bool": (bool,), "int | None": (int, type(None))}


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens; names and meanings as in vLLM and Hugging Face.

    Attributes:
        max_new_tokens: tokens to generate at most, a sequence.
        temperature: 0 is greedy; below MIN_TEMPERATURE a quotient of logits could overflow.
        top_p: keep the smallest set of tokens whose probability reaches this.
        top_k: keep this many tokens; 0 keeps all.
        min_p: keep tokens whose probability is at least this share of the likeliest one's; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or the reply; 1 does
            nothing.
        presence_penalty: subtracted from the logits of tokens in the reply.
        frequency_penalty: the same, times how often a token is in the reply.
        logprobs: log-probabilities a step of so many likeliest tokens, before penalties and temperature; None for none.
        seed: of the random choice; sequence i of a batch uses its own generator, seeded seed + i.
        eos_token_ids: tokens that end a sequence; they are returned as its last token.
        ignore_eos: generate max_new_tokens in any case (for benchmarks).
        min_tokens: none of `eos_token_ids` is chosen, and no stop string looked for, before so many.

    Raises:
        GenerationError: a value is of another type, or out of range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            types, value = _TYPES.get(str(field.type), (object,)), getattr(self, field.name)
            if not isinstance(value, types) or (isinstance(value, bool) and int in types):
                raise GenerationError(f"{field.name}: expected {field.type}, got {value!r}")
        for name, valid, expected in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            (
                "temperature",
                self.temperature == 0 or MIN_TEMPERATURE <= self.temperature < float("inf"),
                f"0 (greedy) or a finite number, at least {MIN_TEMPERATURE}",
            ),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("top_k", self.top_k >= 0, "at least 0 (0 keeps all)"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("repetition_penalty", 0 < self.repetition_penalty <= 2, "in (0, 2]"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"),
            ("min_tokens", self.min_tokens >= 0, "at least 0"),
            ("seed", 0 <= self.seed < 2**63, "from 0 to 2**63 - 1"),
        ):
            if not valid:
                raise GenerationError(f"{name}: expected {expected}, got {getattr(self, name)!r}")

    @property
    def penalizes(self) -> bool:
        """Whether logits depend on the tokens before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of one step of a sequence.

    Attributes:
        chosen: of the token that was chosen.
        top: token ids and theirs, the likeliest first.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


def check_finite(logits: Tensor) -> None:
    """Refuse logits of which no token can be chosen.

    Raises:
        GenerationError: there are NaN or Inf; how many.
    """
    bad = int((~logits.isfinite()).sum())
    if bad:
        raise GenerationError(
            f"{bad} of {logits.numel()} logits are NaN or Inf: weights or fields of config.json lead out of"
            f" {str(logits.dtype).removeprefix('torch.')}'s range; `kimi-k2 verify` or `parity` show where"
        )


def _shares(weights: Tensor) -> Tensor:
    """Weights [B, V] in 2**-45 of each row's largest, int64.

    Their sums are the same in any order: ranks must choose the same, though a GPU adds floats as its blocks happen to
    run.
    """
    return (weights.double() / weights.amax(dim=-1, keepdim=True) * 2.0**45).long()


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Tokens int64 [B] with the probabilities of weights [B, V], by numbers float64 [B] from 0 up to 1."""
    ends = _shares(weights).cumsum(dim=-1)
    whole = ends[:, -1:]
    at = torch.minimum((uniform.unsqueeze(1) * whole).long(), whole - 1)
    return torch.searchsorted(ends, at, right=True).squeeze(1).clamp(max=weights.shape[1] - 1)  # of NaN: any


def token_logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[TokenLogprobs, ...]:
    """Of logits [B, vocab_size] and chosen tokens int64 [B], with so many of the likeliest."""
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    values, ids = logprobs.topk(count, dim=-1)
    rows = zip(chosen, ids.tolist(), values.tolist(), strict=True)
    return tuple(TokenLogprobs(own, tuple(zip(*top, strict=True))) for own, *top in rows)


class Sampler:
    """Chooses the next token of each sequence, reproducibly whatever else is in the batch.

    Args:
        params: how to choose.
        prompts: token ids of each sequence so far.

    Attributes:
        logprobs: of the last step, a sequence each; empty unless `params.logprobs` asks for them.
        reply_lengths: tokens that were chosen of each sequence.
    """

    def __init__(self, params: SamplingParams, prompts: Sequence[Sequence[int]]) -> None:
        self.params = params
        self.generators = [random.Random(params.seed + i) for i in range(len(prompts))]
        self.logprobs: tuple[TokenLogprobs, ...] = ()
        self._prompts, self._counts = prompts, torch.empty(0)
        self.reply_lengths = [0] * len(prompts)

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits [B, vocab_size] to token ids int64 [B].

        Raises:
            GenerationError: (for logits on a CPU) see `check_finite`.
        """
        if not logits.is_cuda:  # a GPU's would have to be waited for
            check_finite(logits)
        penalized = self._processed(logits)
        if self.params.temperature == 0:
            tokens = penalized.argmax(dim=-1)
        else:
            uniform = torch.tensor([generator.random() for generator in self.generators], dtype=torch.float64)
            tokens = draw(self.probabilities(penalized.float()), uniform.to(logits.device))
        if self.params.penalizes:
            self._counts.scatter_add_(1, tokens[:, None], torch.ones_like(self._counts[:, :1]))
        self.reply_lengths = [length + 1 for length in self.reply_lengths]
        if self.params.logprobs is not None:
            self.logprobs = token_logprobs(logits, tokens, self.params.logprobs)
        return tokens

    def along(self, logits: Tensor, drafted: Tensor) -> Tensor:
        """Processed logits of places in a row, as if the drafted tokens before each were in the reply.

        Args:
            logits: [B, K + 1, vocab_size].
            drafted: int64 [B, K].
        """
        if not self.params.penalizes and min(self.reply_lengths) >= self.params.min_tokens:
            return logits
        processed = [self._processed(logits[:, 0])]
        counts = self._counts.clone()
        for position in range(drafted.shape[1]):
            if self.params.penalizes:
                self._counts.scatter_add_(1, drafted[:, position, None], torch.ones_like(counts[:, :1]))
            processed.append(self._processed(logits[:, position + 1], position + 1))
        self._counts = counts
        return torch.stack(processed, dim=1)

    def count(self, taken: Sequence[Sequence[int]]) -> None:
        """Take note of tokens of each sequence that were chosen elsewhere."""
        self.reply_lengths = [length + len(own) for length, own in zip(self.reply_lengths, taken, strict=True)]
        if self.params.penalizes:
            for row, tokens in zip(self._counts, taken, strict=True):
                for token in tokens:
                    row[token] += 1

    def _processed(self, logits: Tensor, ahead: int = 0) -> Tensor:
        """Logits [B, vocab_size] with penalties, and without end tokens where a sequence has fewer than min_tokens."""
        params = self.params
        logits = self._penalized(logits) if params.penalizes else logits
        early = [length + ahead < params.min_tokens for length in self.reply_lengths]
        if not any(early) or params.ignore_eos:
            return logits
        ends = torch.zeros(logits.shape[1], dtype=torch.bool)
        ends[list(params.eos_token_ids)] = True
        return logits.masked_fill((torch.tensor(early)[:, None] & ends).to(logits.device), float("-inf"))

    def _penalized(self, logits: Tensor) -> Tensor:
        if not self._counts.numel():
            self._counts = torch.zeros_like(logits, dtype=torch.float32)
            self._in_prompt = torch.zeros_like(logits, dtype=torch.bool)
            for row, prompt in zip(self._in_prompt, self._prompts, strict=True):
                row[torch.tensor([token for token in prompt if token < len(row)], device=row.device)] = True
        logits, counts, params = logits.float(), self._counts, self.params
        penalty = torch.where(logits > 0, 1 / params.repetition_penalty, params.repetition_penalty)
        logits = torch.where(self._in_prompt | (counts > 0), logits * penalty, logits)
        return logits - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Of penalized logits [B, vocab_size], each row up to a factor: temperature, top-k, top-p and min-p applied."""
        logits = logits / self.params.temperature
        if self.params.top_k and self.params.top_k < logits.shape[-1]:
            threshold = logits.topk(self.params.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < threshold, float("-inf"))
        probabilities = logits.softmax(dim=-1)
        if self.params.top_p < 1:
            ordered, order = probabilities.sort(dim=-1, descending=True)
            # A token stays if the mass before it is still below top_p, so the first one always stays.
            shares = _shares(ordered)
            before, whole = shares.cumsum(dim=-1) - shares, shares.sum(dim=-1, keepdim=True)
            ordered = ordered.masked_fill(before >= self.params.top_p * whole.double(), 0)
            probabilities = torch.zeros_like(probabilities).scatter_(-1, order, ordered)
        if self.params.min_p > 0:
            least = self.params.min_p * probabilities.amax(dim=-1, keepdim=True)
            probabilities = probabilities.masked_fill(probabilities < least, 0)
        return probabilities


@dataclass(frozen=True)
class Step:
    """What one step produced: a token for each sequence, None for those that have ended, and its seconds.

    With `SamplingParams.logprobs` also log-probabilities, of each sequence. With drafts a verification gives some
    sequences several tokens: it is as many steps, of which the first has the seconds, and a sequence that got fewer
    has None in the last.
    """

    tokens: tuple[int | None, ...]
    seconds: float
    logprobs: tuple[TokenLogprobs, ...] = ()


# What `stream` gives: it holds the model from the first `next` to the end or `close`.
Steps = Generator[Step, None, None]


class Proposal(NamedTuple):
    """Drafted tokens of each sequence.

    Attributes:
        tokens: int64 [B, K].
        counts: how many of the K each sequence has.
        probabilities: what they were drawn from, float32 [B, K, vocab_size]; None for 1 at each token.
    """

    tokens: Tensor
    counts: tuple[int, ...]
    probabilities: Tensor | None = None


def keep(
    target: Tensor, drafted: Tensor, counts: Tensor, draft: Tensor | None, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """How many of each sequence's drafted tokens are kept, and the one after them. Nothing is read back.

    Args:
        target: [B, K + 1, V], the target's probabilities at each place, each row up to a factor.
        drafted: int64 [B, K].
        counts: int64 [B], how many of the K each sequence has.
        draft: [B, K, V], what they were drawn from; None for 1 at each.
        uniform: float64 [B, K + 1], from 0 up to 1: one for each drafted token, and the last.

    Returns:
        int64 [B] and int64 [B].
    """
    target = target / target.sum(dim=-1, keepdim=True)
    there, tokens = torch.arange(drafted.shape[1], device=drafted.device) < counts[:, None], drafted.unsqueeze(2)
    chance = 1.0 if draft is None else draft.gather(2, tokens).squeeze(2)
    kept = uniform[:, :-1] * chance < target[:, :-1].gather(2, tokens).squeeze(2)
    count = (kept & there).cumprod(dim=1).sum(dim=1)
    rows = torch.arange(len(target), device=target.device)
    row = target[rows, count]
    if drafted.shape[1]:
        refused = count.clamp(max=drafted.shape[1] - 1)
        if draft is None:
            less = torch.zeros_like(row).scatter_(1, drafted[rows, refused, None], 1.0)
        else:
            less = draft[rows, refused]
        rest = (row - less * (count < counts)[:, None]).clamp_(min=0)
        # Rounding alone can leave nothing: then p and q are the same.
        row = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, row)
    return count, draw(row, uniform[:, -1])


def verify(sampler: Sampler, logits: Tensor, proposal: Proposal, running: list[bool]) -> list[list[int]]:
    """What each running sequence goes on with: some of its drafted tokens and one more; none for the others.

    Args:
        sampler: of the generation; its penalties count the drafted tokens before each place.
        logits: [B, K + 1, vocab_size].
        proposal: of the K tokens.
        running: of each sequence.

    Raises:
        GenerationError: (for logits on a CPU) see `check_finite`.
    """
    if not logits.is_cuda:
        check_finite(logits)
    processed, drafts = sampler.along(logits, proposal.tokens), proposal.tokens
    taken: list[list[int]] = []
    if sampler.params.temperature == 0:
        choices = processed.argmax(dim=-1)
        both = torch.cat((choices, drafts), dim=1).tolist()  # one wait for both
        for row, count, alive in zip(both, proposal.counts, running, strict=True):
            chosen, drafted = row[: choices.shape[1]], row[choices.shape[1] :][:count]
            kept = next((position for position, token in enumerate(drafted) if token != chosen[position]), len(drafted))
            taken.append(chosen[: kept + 1] if alive else [])
        return taken
    probabilities = sampler.probabilities(processed.float().flatten(0, 1)).unflatten(0, logits.shape[:2])
    rows = []
    for count, generator, alive in zip(proposal.counts, sampler.generators, running, strict=True):
        numbers = [generator.random() if alive else 0.0 for _ in range(count + 1)]
        rows.append([*numbers[1:], *[0.0] * (drafts.shape[1] - count), numbers[0]])
    uniform = torch.tensor(rows, dtype=torch.float64).to(logits.device)
    counts = torch.tensor(proposal.counts).to(logits.device)
    accepted, following = keep(probabilities, drafts, counts, proposal.probabilities, uniform)
    both = torch.cat((accepted[:, None], following[:, None], drafts), dim=1).tolist()
    return [
        [*drafted[:count], token] if alive else []
        for (count, token, *drafted), alive in zip(both, running, strict=True)
    ]
