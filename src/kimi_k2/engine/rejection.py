"""Which drafted tokens are kept, so that what is generated has the target's distribution exactly.

Speculative sampling (Leviathan et al. 2023, arXiv 2211.17192, appendix A): a token x drawn from q is kept with
probability min(1, p(x) / q(x)); in the place of the first that is not, one is drawn from max(0, p - q), normalised.
Where a draft names one token, q is 1 there. Greedily a token is kept where it is the likeliest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kimi_k2.engine.sampler import Sampler, check_finite


class Proposal(NamedTuple):
    """Drafted tokens of each sequence.

    Attributes:
        tokens: int64 [B, K].
        counts: how many of the K each sequence has.
        probabilities: what they were drawn from, float32 [B, K, vocab_size] on the CPU; None for 1 at each token.
    """

    tokens: Tensor
    counts: tuple[int, ...]
    probabilities: Tensor | None = None


def keep(target: Tensor, drafted: list[int], draft: Tensor | None, generator: torch.Generator) -> list[int]:
    """The drafted tokens that are kept, and one more.

    Args:
        target: [K + 1 or more, V], the target's probabilities at each place, each row up to a factor.
        drafted: K tokens.
        draft: [K, V], what they were drawn from; None for 1 at each.
        generator: of the sequence.
    """
    for place, token in enumerate(drafted):
        row = target[place] / target[place].sum()
        chance = 1.0 if draft is None else float(draft[place, token])
        if float(torch.rand((), dtype=torch.float64, generator=generator)) * chance < float(row[token]):
            continue
        if draft is None:
            rest = row.clone()
            rest[token] = 0
        else:
            rest = (row - draft[place]).clamp_(min=0)
        # Rounding alone can leave nothing: then p and q are the same.
        rest = rest if float(rest.sum()) > 0 else row
        return [*drafted[:place], int(torch.multinomial(rest, 1, generator=generator))]
    last = target[len(drafted)]
    return [*drafted, int(torch.multinomial(last, 1, generator=generator))]


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
    probabilities = sampler.probabilities(processed.float().cpu().flatten(0, 1)).unflatten(0, logits.shape[:2])
    for number, drafted in enumerate(drafts.tolist()):
        count, own = proposal.counts[number], None
        if proposal.probabilities is not None:
            own = proposal.probabilities[number]
        given = probabilities[number], drafted[:count], own, sampler.generators[number]
        taken.append(keep(*given) if running[number] else [])
    return taken
