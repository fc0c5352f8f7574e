"""What proposes tokens to a generation: an Eagle3 head with a cache of its own, or n-grams of the text so far.

N-grams: prompt lookup (Saxena 2023, as vLLM's `ngram`), what followed the last tokens when they stood there before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kimi_k2.drafts.head import Eagle3Head
from kimi_k2.engine.graphs import Captured, Recorder, give_up
from kimi_k2.engine.prompt_step import padded_width
from kimi_k2.engine.sampler import Proposal
from kimi_k2.model.cache import LatentCache

# Tokens that must agree: as many as there are of these, the most first.
MOST, LEAST = 4, 1


def lookup(tokens: Sequence[int], count: int) -> list[int]:
    """Up to `count` tokens that followed the latest earlier place of the longest of the last n-grams.

    Args:
        tokens: prompt and reply so far.
        count: tokens wanted.
    """
    history = list(tokens)
    for width in range(min(MOST, len(history) - 1), LEAST - 1, -1):
        ending = history[-width:]
        for start in range(len(history) - width - 1, -1, -1):
            if history[start + width - 1] == ending[-1] and history[start : start + width] == ending:
                return history[start + width : start + width + count]
    return []


# Graphs kept: of the first pass and of later ones, at a few widths and lengths.
MAX_GRAPHS = 8


class Accepted(NamedTuple):
    """What the steps since the last draft gave each sequence.

    Attributes:
        tokens: new tokens of each; none of one that has ended.
        starts: position of the token before the first of them.
        aux: hidden states [B, S or more, layers * H] at these positions, of which those of a sequence's tokens are
            read; None if the drafter has no `aux_layers`.
    """

    tokens: Sequence[Sequence[int]]
    starts: Sequence[int]
    aux: Tensor | None


# Logits [B, rows] over a draft's vocabulary, and their place in the draft, to rows int64 [B] and what they were drawn
# from [B, rows], None for the likeliest.
Choose = Callable[[Tensor, int], tuple[Tensor, Tensor | None]]


class Drafter(Protocol):
    """Proposes tokens.

    Attributes:
        aux_layers: of the target's hidden states that it reads.
        cost: bytes of weights that drafting a token reads.
    """

    aux_layers: tuple[int, ...]
    cost: float

    def start(self, cache: LatentCache, prompts: Sequence[Sequence[int]]) -> None:
        """A generation begins, whose target writes to `cache`."""

    def read(self, following: Tensor, positions: Tensor, aux: Tensor | None) -> None:
        """A chunk of the prompts was read.

        Args:
            following: int64 [B, S] on the CPU, of each place the token after it.
            positions: int64 [B, S] on the CPU; negative for padding and where no token follows yet.
            aux: hidden states [B, S, layers * H].
        """

    def propose(self, last: Accepted, wanted: Sequence[int], choose: Choose) -> Proposal:
        """Draft up to `wanted` tokens of each sequence after those that were accepted last."""

    def close(self) -> None:
        """Give caches and graphs up."""


class NgramDrafter:
    """Drafts by `lookup`; for text that repeats itself or its prompt."""

    aux_layers: tuple[int, ...] = ()
    cost = 0.0

    def __init__(self) -> None:
        self._held: list[list[int]] = []
        self._device = torch.device("cpu")

    def start(self, cache: LatentCache, prompts: Sequence[Sequence[int]]) -> None:
        """See `Drafter`."""
        self._held, self._device = [list(prompt) for prompt in prompts], cache.data.device

    def read(self, following: Tensor, positions: Tensor, aux: Tensor | None) -> None:
        """See `Drafter`; the prompts are known already."""

    def propose(self, last: Accepted, wanted: Sequence[int], choose: Choose) -> Proposal:
        """See `Drafter`."""
        for history, tokens in zip(self._held, last.tokens, strict=True):
            history += tokens
        drafts = [lookup(history, count) if count else [] for history, count in zip(self._held, wanted, strict=True)]
        made = torch.zeros(len(drafts), max(map(len, drafts)), dtype=torch.int64)
        for row, drafted in zip(made, drafts, strict=True):
            row[: len(drafted)] = torch.tensor(drafted, dtype=torch.int64)
        return Proposal(made.to(self._device), tuple(map(len, drafts)))

    def close(self) -> None:
        """See `Drafter`."""


class DraftCache(LatentCache):
    """The cache of a head's one layer, [N, page, width], in the pages of the target's block table."""

    def __init__(self, target: LatentCache, width: int, dtype: torch.dtype) -> None:
        self.target, self.max_length = target, target.max_length
        pages, page = target.data.shape[1:3]
        self.data = torch.zeros(pages, page, width, dtype=dtype, device=target.data.device)

    def update(self, layer: int, entries: Tensor, positions: Tensor, length: int) -> Tensor:
        """As LatentCache's."""
        return self.target.stored(self.data, entries, positions, length)


class HeadDrafter:
    """Chains of an Eagle3 head: its first pass reads what was accepted, each later one the token drafted before.

    Entries of tokens that are rejected stay in its cache until the next first pass writes over them; what lies behind
    is masked.

    Args:
        head: of the target.
        recorder: makes what captures passes, on a GPU; None launches them one by one.
    """

    def __init__(self, head: Eagle3Head, recorder: Callable[[], Recorder] | None = None) -> None:
        self.head, self.aux_layers, self.recorder = head, head.aux_layers, recorder
        weights = (weight for name, weight in head.named_parameters() if "embed_tokens" not in name)
        self.cost = float(sum(weight.nbytes for weight in weights))
        self._cache: DraftCache | None = None
        self._record: Recorder | None = None
        self._captured: dict[tuple[bool, int, int], Captured] = {}

    def start(self, cache: LatentCache, prompts: Sequence[Sequence[int]]) -> None:
        """See `Drafter`."""
        if self._cache is None or self._cache.target is not cache:
            self.close()
            self._cache = DraftCache(cache, self.head.cache_dim, self.head.dtype)
            self._forget()

    @torch.inference_mode()
    def read(self, following: Tensor, positions: Tensor, aux: Tensor | None) -> None:
        """See `Drafter`."""
        length = int(positions.max()) + 1
        if length > 0:
            assert self._cache is not None and aux is not None
            tokens, positions = (tensor.to(self._cache.data.device) for tensor in (following, positions))
            with self.head.computing():
                self.head(tokens, self.head.fuse(aux), positions, self._cache, length)

    @torch.inference_mode()
    def propose(self, last: Accepted, wanted: Sequence[int], choose: Choose) -> Proposal:
        """See `Drafter`."""
        assert self._cache is not None and last.aux is not None
        device, width = self._cache.data.device, last.aux.shape[1]
        tokens = torch.tensor([[*own, *[0] * (width - len(own))] for own in last.tokens])
        counts, columns = torch.tensor([len(own) for own in last.tokens]), torch.arange(width)
        positions = torch.where(columns < counts[:, None], torch.tensor(last.starts)[:, None] + columns, -1)
        ends = (counts - 1).clamp(min=0)
        at = positions.gather(1, ends[:, None])  # of the last hidden state of each
        most = max(wanted)
        # Sequences of which more is wanted go on; the others become padding.
        places = torch.where(torch.arange(most) < torch.tensor(wanted)[:, None], at + torch.arange(most), -1).to(device)
        furthest = int(at.max()) + max(most, 1)
        logits, hidden = self._pass(True, furthest, tokens.to(device), last.aux, positions.to(device), ends.to(device))
        drafted: list[Tensor] = []
        drawn: list[Tensor | None] = []
        zero = torch.zeros_like(ends, device=device)
        for place in range(most):
            if place:
                inputs = drafted[-1].unsqueeze(1), hidden.unsqueeze(1), places[:, place : place + 1], zero
                logits, hidden = self._pass(False, furthest, *inputs)
            rows, probabilities = choose(logits, place)
            drafted.append(self.head.to_target(rows))
            drawn.append(probabilities)
        made = torch.stack(drafted, dim=1) if drafted else tokens[:, :0].to(device)
        return Proposal(made, tuple(wanted), self._over_tokens(drawn))

    def _over_tokens(self, drawn: Sequence[Tensor | None]) -> Tensor | None:
        """Probabilities over the draft's rows as those over the target's tokens, [B, K, vocab_size]."""
        known = [one for one in drawn if one is not None]
        if not known:
            return None
        rows = torch.stack(known, dim=1)
        if self.head.tokens is None:
            return rows
        wide = rows.new_zeros(*rows.shape[:2], self.head.config.vocab_size)
        wide[..., self.head.tokens] = rows
        return wide

    def _pass(
        self, first: bool, furthest: int, tokens: Tensor, states: Tensor, positions: Tensor, at: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits [B, rows] and hidden states [B, H] of column `at` of each sequence, for the caller to keep.

        Args:
            first: `states` are the target's, else the head's.
            furthest: slots that all passes of this step attend to at most.
        """
        assert self._cache is not None
        if self._record is None:
            return self.run(first, max(furthest, 1), tokens, states, positions, at)
        length = min(padded_width(furthest), self._cache.max_length)
        key = first, tokens.shape[1], length
        if key not in self._captured:
            inputs = tokens.clone(), states.clone(), positions.clone(), at.clone()
            run = partial(self.run, first, length, *inputs)
            run()
            if len(self._captured) >= MAX_GRAPHS:
                self._forget()
            self._captured[key] = Captured(inputs, self._record(run))
        logits, hidden = self._captured[key](tokens, states, positions, at)
        return logits.clone(), hidden.clone()  # another pass writes over them

    def run(
        self, first: bool, length: int, tokens: Tensor, states: Tensor, positions: Tensor, at: Tensor
    ) -> tuple[Tensor, Tensor]:
        """A pass, launch by launch.

        Args:
            first: `states` are the target's, [B, S, layers * H], else the head's, [B, S, H].
            length: slots to attend to.
            tokens, positions: int64 [B, S], as `Eagle3Head` takes them.
            at: int64 [B], the column of each sequence that is wanted.

        Returns:
            Logits [B, rows] and hidden states [B, H] there.
        """
        assert self._cache is not None
        with self.head.computing():
            hidden = self.head.fuse(states) if first else states
            normed, after = self.head(tokens, hidden, positions, self._cache, length)
            rows = torch.arange(len(at), device=at.device)
            return self.head.logits(normed[rows, at]), after[rows, at]

    def close(self) -> None:
        """See `Drafter`."""
        self._cache = None
        self._forget()

    def _forget(self) -> None:
        """Give the graphs up; later ones get other memory: a pool whose graphs are all gone takes no more."""
        give_up(self._captured)
        self._record = None
        if self.recorder is not None and self._cache is not None and self._cache.data.is_cuda:
            self._record = self.recorder()
