"""Which drafted tokens are kept, so that what is generated has the target's distribution exactly.

Speculative sampling (Leviathan et al. 2023, arXiv 2211.17192, appendix A): a token x drawn from q is kept with
probability min(1, p(x) / q(x)); in the place of the first that is not, one is drawn from max(0, p - q), normalised.
Where a draft names one token, q is 1 there. Greedily a token is kept where it is the likeliest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kimi_k2.engine.sampler import Sampler, check_finite, draw


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
            kept = next((place for place, token in enumerate(drafted) if token != chosen[place]), len(drafted))
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
