"""How many tokens to draft: as many as acceptance so far pays for, none where more rows cost more than they save.

A step reads the weights of all experts that its rows choose, so that its cost follows from the rows alone; nothing is
timed, and the same acceptance gives the same lengths on every rank and in every run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kimi_k2.checkpoint.names import EXPERT, layer_specs
from kimi_k2.config import KimiK2Config

# Acceptance that is assumed at first, and tokens that this weighs as much as.
PRIOR, PRIOR_WEIGHT = 0.6, 8
# Verifications that half of what is known is of.
MEMORY = 64
# Steps without drafts until one is tried again: at first, and after several that did not pay.
PAUSE, LONGEST = 32, 256
# Operations in the time of a byte read: 989e12 dense 16-bit ones and 3.35e12 bytes a second (NVIDIA, H100 SXM).
OPERATIONS = 295


@dataclass
class DraftStats:
    """What was drafted and accepted, of all sequences.

    Attributes:
        drafted, accepted: tokens by their place in a draft, from the first.
        steps: verifications, each sequence counted.
        tokens: that these steps gave.
        warned: it was said that too few are accepted.
    """

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0
    warned: bool = False

    @property
    def rates(self) -> list[float]:
        """Share of the drafted tokens at each place that were accepted."""
        return [kept / max(drafted, 1) for kept, drafted in zip(self.accepted, self.drafted, strict=True)]

    @property
    def tokens_per_step(self) -> float:
        """Tokens a verification and sequence."""
        return self.tokens / max(self.steps, 1)

    def add(self, drafted: int, accepted: int, tokens: int) -> None:
        """One sequence's verification; `tokens` may be fewer where the sequence ended."""
        for by_place, count in ((self.drafted, drafted), (self.accepted, accepted)):
            by_place += [0] * (drafted - len(by_place))
            for position in range(count):
                by_place[position] += 1
        self.steps += 1
        self.tokens += tokens

    def __str__(self) -> str:
        by_place = "accepted by position " + ", ".join(f"{rate:.2f}" for rate in self.rates)
        return f"{self.tokens_per_step:.2f} tokens a step, {by_place if self.rates else 'nothing drafted'}"


def step_cost(config: KimiK2Config) -> Callable[[int], float]:
    """Of so many rows that choose their experts evenly: bytes of stored weights read, and operations as bytes."""
    rest, experts = 2.0 * config.vocab_size * config.hidden_size, 0.0
    share = config.num_experts_per_tok / config.n_routed_experts
    active = float(config.vocab_size * config.hidden_size)
    layers = Counter(map(config.is_moe_layer, range(config.num_hidden_layers)))
    for kind, count in layers.items():
        layer = next(number for number in range(config.num_hidden_layers) if config.is_moe_layer(number) is kind)
        for spec in layer_specs(config, layer):
            if EXPERT.match(spec.name):
                experts += spec.nbytes * count
            else:
                rest += spec.nbytes * count
                active += math.prod(spec.shape) * count
        if kind:  # their stored shapes may be of packed integers
            active += 3 * config.hidden_size * config.moe_intermediate_size * config.num_experts_per_tok * count
    return lambda rows: rest + experts * (1 - (1 - share) ** rows) + 2 * active * rows / OPERATIONS


class DraftLength:
    """Chooses the number of drafted tokens of each step.

    Args:
        most: tokens at most.
        cost: of a step of so many rows, in any unit; None drafts `most` tokens always.
        draft_cost: of drafting one token, in the same unit.
    """

    def __init__(self, most: int, cost: Callable[[int], float] | None = None, draft_cost: float = 0.0) -> None:
        self.most, self.cost, self.draft_cost = most, cost, draft_cost
        self._kept = [PRIOR * PRIOR_WEIGHT] * most
        self._made = [float(PRIOR_WEIGHT)] * most
        self._paused, self._wait = 0, PAUSE

    def choose(self, sequences: int) -> int:
        """Tokens to draft for so many running sequences."""
        if self.cost is None:
            return self.most
        best, best_length, tokens, chance = 1 / self.cost(sequences), 0, 1.0, 1.0
        for position in range(self.most):
            chance *= self._kept[position] / self._made[position]
            tokens += chance
            gain = tokens / (self.cost(sequences * (position + 2)) + self.draft_cost * (position + 1))
            if gain > best:
                best, best_length = gain, position + 1
        if best_length:
            self._paused, self._wait = 0, PAUSE
            return best_length
        self._paused += 1
        if self._paused < self._wait:
            return 0
        self._paused, self._wait = 0, min(2 * self._wait, LONGEST)
        return 1

    def observe(self, drafted: int, accepted: int) -> None:
        """A sequence's verification: a place counts where all before it were accepted."""
        for position in range(min(drafted, accepted + 1)):
            self._kept[position] = self._kept[position] * (1 - 1 / MEMORY) + (position < accepted)
            self._made[position] = self._made[position] * (1 - 1 / MEMORY) + 1
