"""Generation with drafts of every quality gives what generation without gives."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import Tensor

from kimi_k2.drafts.config import Form
from kimi_k2.drafts.head import Eagle3Head
from kimi_k2.engine.draft_length import DraftLength, DraftStats
from kimi_k2.engine.drafters import Accepted, Choose, Drafter, HeadDrafter, NgramDrafter, lookup
from kimi_k2.engine.generate import Generator, generate
from kimi_k2.engine.sampler import Proposal, Sampler, SamplingParams, Step, keep
from kimi_k2.engine.speculate import PromptReader, speculative_steps
from kimi_k2.errors import KimiK2Warning
from kimi_k2.model.cache import LatentCache
from kimi_k2.model.decoder import HiddenStates, KimiK2ForCausalLM
from kimi_k2.synthetic.draft import write_synthetic_head

DRAWN = int(os.environ.get("KIMI_K2_DRAWS", "4"))
PART = 25  # of them in one test
DRAWS = 250 * DRAWN
SEEDS = range(10 if os.environ.get("KIMI_K2_SLOW") else 1)


class Oracle(NgramDrafter):
    """Knows the replies; each token that it drafts is wrong with a chance."""

    def __init__(self, replies: list[list[int]], wrong: float = 0.0) -> None:
        self.replies, self.wrong, self.random = replies, wrong, random.Random(1)

    def start(self, cache: LatentCache, prompts: Sequence[Sequence[int]]) -> None:
        self.said = [0] * len(prompts)

    def propose(self, last: Accepted, wanted: Sequence[int], choose: Choose) -> Proposal:
        tokens = torch.zeros(len(wanted), max(wanted), dtype=torch.int64)
        for row, own in enumerate(last.tokens):
            self.said[row] += len(own)
            for place in range(wanted[row]):
                right = self.replies[row][self.said[row] + place]
                tokens[row, place] = abs(right - 1) if self.random.random() < self.wrong else right
        return Proposal(tokens, tuple(wanted))


def drawn(seed: int, count: int, vocabulary: int) -> list[list[int]]:
    """Prompts of drawn lengths, half of them with parts that repeat."""
    rng = random.Random(seed)
    prompts = []
    for _ in range(count):
        pattern = [rng.randrange(vocabulary) for _ in range(rng.choice([1, 2, 3, 17, 40, 70]))]
        prompts.append(pattern * rng.choice([1, 2]))
    return prompts


def replies_of(steps: Iterable[Step]) -> list[list[int]]:
    rows = zip(*(step.tokens for step in steps), strict=True)
    return [[token for token in row if token is not None] for row in rows]


def speak(generator: Generator, prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    return replies_of(generator.stream(prompts, params))


def head_drafters(model: KimiK2ForCausalLM, directory: Path) -> dict[str, Drafter]:
    found: dict[str, Drafter] = {"ngram": NgramDrafter()}
    for name, form, changes in (("llama", "llama", {"draft_vocab_size": 96}), ("mla", "mla", {"fc_norm": True})):
        write_synthetic_head(directory / name, model.config, form, **changes)  # type: ignore[arg-type]
        found[name] = HeadDrafter(Eagle3Head.from_pretrained(directory / name, model))
    return found


def off_now_and_then(monkeypatch: pytest.MonkeyPatch, lengths: Sequence[int]) -> None:
    """Drafts of these lengths again and again; what steps without gave is read three at a time."""
    turns = itertools.cycle(lengths)
    monkeypatch.setattr(DraftLength, "choose", lambda self, sequences: min(next(turns), self.most))
    monkeypatch.setattr("kimi_k2.engine.speculate.PAUSE", 3)


# Each counts what was drafted before.
PENALTIES = {"repetition_penalty": 1.4, "frequency_penalty": 0.4, "presence_penalty": 0.2}
GREEDY: list[dict[str, Any]] = [{}, PENALTIES, {"min_tokens": 7}, {"min_tokens": 7, **PENALTIES}]


@pytest.mark.filterwarnings("ignore::kimi_k2.errors.KimiK2Warning")
@pytest.mark.parametrize("lengths", [None, (2, 0, 0, 1, 0, 0, 0, 0, 0, 5)], ids=["always", "off at times"])
@pytest.mark.parametrize("part", range(-(-DRAWN // PART)))
def test_greedy_is_token_for_token_that_without(
    model: KimiK2ForCausalLM, tmp_path: Path, part: int, lengths: Sequence[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In batches of drawn sizes and lengths, over end tokens amid a draft, whatever the quality."""
    if lengths:
        off_now_and_then(monkeypatch, lengths)
    prompts = drawn(part, min(DRAWN - part * PART, PART), model.config.vocab_size)
    rng, heads = random.Random(2 + part), head_drafters(model, tmp_path)
    while prompts:
        batch = [prompts.pop() for _ in range(min(rng.choice([1, 3, 4]), len(prompts)))]
        setting: dict[str, Any] = rng.choice(GREEDY)
        replies = generate(model, batch, SamplingParams(max_new_tokens=24, **setting))
        end = frozenset(reply[rng.randrange(8)] for reply in replies[1:])
        params = SamplingParams(max_new_tokens=rng.choice([1, 2, 9, 14]), eos_token_ids=end, **setting)
        wanted = generate(model, batch, params)
        oracles = {"half": Oracle(replies, wrong=0.5), "perfect": Oracle(replies)}
        for name, drafter in {**heads, **oracles}.items():
            generator = Generator(model, drafter=drafter, draft_tokens=rng.choice([1, 3, 5]))
            assert speak(generator, batch, params) == wanted, name
            if name == "perfect" and params.max_new_tokens > 1 and not params.min_tokens:
                stats = generator.stats
                assert stats.accepted == stats.drafted


@pytest.mark.filterwarnings("ignore::kimi_k2.errors.KimiK2Warning")
@pytest.mark.parametrize(("form", "layers", "off", "prompt"), [
    ("llama", [0, 1, 2], False, [5, 6, 7, 8, 9]), ("llama", [1, 2, 3], True, [5, 6, 7, 8, 9]),
    ("mla", [0, 2, 3], False, [7]),
])  # fmt: skip
def test_chains_are_those_of_a_head_without_a_cache(
    model: KimiK2ForCausalLM,
    tmp_path: Path,
    form: Form,
    layers: list[int],
    off: bool,
    prompt: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each drafted token is what the head makes of the whole text so far in one pass, after rejections too.

    And after steps without drafts. What the head reads is what the plain model's layers give.
    """
    if off:
        off_now_and_then(monkeypatch, (2, 0, 0, 1, 0, 0, 0, 0, 0, 3))
    write_synthetic_head(tmp_path, model.config, form, eagle_config={"eagle_aux_hidden_state_layer_ids": layers})
    head = Eagle3Head.from_pretrained(tmp_path, model)
    params = SamplingParams(max_new_tokens=20 if off else 9)
    drafts: list[tuple[list[int], list[int]]] = []

    class Noting(HeadDrafter):
        def propose(self, last: Accepted, wanted: Sequence[int], choose: Choose) -> Proposal:
            held.extend(last.tokens[0])
            made = super().propose(last, wanted, choose)
            drafts.append((list(held), made.tokens[0, : wanted[0]].tolist()))
            return made

    held = list(prompt)
    speak(Generator(model, drafter=Noting(head)), [prompt], params)
    assert len(drafts) > 4
    for text, made in drafts:
        states = HiddenStates(head.aux_layers)
        model(torch.tensor([text]), states=states)
        hidden, tokens = head.fuse(states.joined()[:, :-1]), list(text[1:])
        for token in made:
            cache = LatentCache(model.config, 1, 64)
            drafter = HeadDrafter(head)
            drafter.start(cache, [text])
            assert drafter._cache is not None
            places = torch.arange(len(tokens))[None]
            normed, after = head(torch.tensor([tokens]), hidden, places, drafter._cache, len(tokens))
            assert int(head.logits(normed[0, -1]).argmax()) == token
            hidden, tokens = torch.cat((hidden, after[:, -1:]), dim=1), [*tokens, token]


def rows_of(steps: Iterable[Step]) -> list[list[Any]]:
    """Of each sequence its tokens with their log-probabilities."""
    rows = zip(*(zip(step.tokens, step.logprobs, strict=True) for step in steps), strict=True)
    return [[each for each in row if each[0] is not None] for row in rows]


def test_batch_invariant_mode_is_bit_equal(model: KimiK2ForCausalLM) -> None:
    """Log-probabilities of a verification are a plain step's, bit by bit."""
    prompts = drawn(5, 2, model.config.vocab_size)
    params = SamplingParams(max_new_tokens=6, logprobs=2)
    model.batch_invariant = True
    try:
        plain = rows_of(Generator(model).stream(prompts, params))
        longer = generate(model, prompts, SamplingParams(max_new_tokens=12))
        for wrong in (0.0, 0.5):
            assert rows_of(Generator(model, drafter=Oracle(longer, wrong)).stream(prompts, params)) == plain
    finally:
        model.batch_invariant = False


class Table(NgramDrafter):
    """A target and a draft whose logits follow from the last token alone."""

    def __init__(self, seed: int, vocabulary: int = 64, spread: float = 1.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.target = torch.randn(vocabulary, vocabulary, generator=generator) * spread
        self.draft = self.target + torch.randn(vocabulary, vocabulary, generator=generator)

    def verify(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.target[tokens], None

    def propose(self, last: Accepted, wanted: Sequence[int], choose: Choose) -> Proposal:
        token = torch.tensor([own[-1] if own else 0 for own in last.tokens])
        drafted, drawn = [], []
        for place in range(max(wanted)):
            token, probabilities = choose(self.draft[token], place)
            drafted.append(token)
            drawn.append(probabilities)
        if not drafted:
            return Proposal(torch.zeros(len(wanted), 0, dtype=torch.int64), tuple(wanted))
        rows = None if drawn[0] is None else torch.stack([one for one in drawn if one is not None], dim=1)
        return Proposal(torch.stack(drafted, dim=1), tuple(wanted), rows)


class Certain(Table):
    """Drafts the likeliest token alone, whatever the temperature."""

    def propose(self, last: Accepted, wanted: Sequence[int], choose: Choose) -> Proposal:
        return super().propose(last, wanted, lambda logits, place: (logits.argmax(dim=-1), None))


@pytest.mark.parametrize("setting", GREEDY[1:])
def test_what_was_drafted_before_counts(setting: dict[str, Any]) -> None:
    """Of a target that repeats a token until it is penalized enough."""
    table, prompts = Table(1), [[token] for token in range(8)]
    table.target += 3 * torch.eye(64)
    params = SamplingParams(24, eos_token_ids=frozenset(range(0, 64, 3)), **setting)

    def run(drafter: Oracle, most: int) -> list[list[int]]:
        sampler, length = Sampler(params, prompts), DraftLength(most)
        drafter.start(None, prompts)  # type: ignore[arg-type]

        def begin() -> tuple[Tensor, Tensor | None]:
            return sampler(table.target[torch.arange(8)]), None

        return replies_of(speculative_steps(prompts, sampler, begin, table.verify, drafter, length, DraftStats()))

    wanted = run(Oracle([[]] * 8), 0)
    assert run(Oracle([[*own, *[1] * 24] for own in wanted]), 4) == wanted


def chances(logits: Tensor, replies: list[list[int]], params: SamplingParams) -> np.ndarray[Any, Any]:
    """Probabilities of each row behind a reply to token 0, as `test_defaults.py` holds them to transformers'."""
    sampler = Sampler(params, [[0]] * len(replies))
    nothing = torch.zeros(len(replies), 0, dtype=torch.int64)
    sampler.along(logits[:, None], nothing)  # so that tokens are counted from the first
    sampler.count(replies)
    found = sampler.probabilities(sampler.along(logits[:, None], nothing)[:, 0].double())
    return (found / found.sum(dim=-1, keepdim=True)).numpy()


SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 20},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.7},
]


class Noted(DraftLength):
    """Two tokens always; keeps what was accepted."""

    def __init__(self) -> None:
        super().__init__(2)
        self.accepted: list[int] = []

    def observe(self, drafted: int, accepted: int) -> None:
        self.accepted.append(accepted)


def chi_square(observed: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """The p value, cells of fewer than ten expected put together."""
    few = expected < 10
    cells = [*zip(observed[~few], expected[~few], strict=True), (observed[few].sum(), expected[few].sum())]
    cells = [(seen, hoped) for seen, hoped in cells if hoped > 0]
    statistic = sum((seen - hoped) ** 2 / hoped for seen, hoped in cells)
    return float(torch.special.gammaincc(*torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)))


@pytest.mark.parametrize(
    ("kind", "setting"),
    [*((Table, setting) for setting in SETTINGS), (Certain, SETTINGS[3])],
    ids=lambda value: value.__name__ if isinstance(value, type) else "-".join(value),
)
@pytest.mark.parametrize("seed", SEEDS)
def test_sampled_pairs_have_the_targets_distribution(kind: type[Table], setting: dict[str, Any], seed: int) -> None:
    """Tokens two and three of a reply, which a draft of two was verified for; and acceptance as the formula has it."""
    table, batch = kind(seed), min(500, DRAWS)
    params = SamplingParams(max_new_tokens=4, **setting)
    found: Counter[tuple[int, ...]] = Counter()
    accepted, first = list[int](), 7
    for number in range(-(-DRAWS // batch)):
        prompts = [[0]] * batch
        numbered = SamplingParams(max_new_tokens=4, seed=(seed << 32) + number * batch, **setting)
        sampler = Sampler(numbered, prompts)
        sampler.along(torch.zeros(batch, 1, 64), torch.zeros(batch, 0, dtype=torch.int64))
        sampler.count([[first]] * batch)

        def begin() -> tuple[Tensor, Tensor | None]:
            return torch.full((batch,), first), None

        noted = Noted()
        steps = speculative_steps(prompts, sampler, begin, table.verify, table, noted, DraftStats())
        found.update(tuple(reply[1:3]) for reply in replies_of(steps))
        accepted += noted.accepted[:batch]  # of the first verification
    count = sum(found.values())
    second = chances(table.target[first][None], [[first]], params)[0]
    expected = second[:, None] * chances(table.target, [[first, token] for token in range(64)], params)
    observed = np.zeros_like(expected)
    for (a, b), times in found.items():
        observed[a, b] = times
    assert observed[expected == 0].sum() == 0
    assert chi_square(observed, expected * count) > 1e-4
    own = SamplingParams(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p)
    draft = chances(table.draft[first][None], [[]], own)[0]
    chance = np.minimum(second, draft).sum() if kind is Table else second[table.draft[first].argmax()]
    rate = sum(kept > 0 for kept in accepted) / count
    assert abs(rate - chance) < 4.5 * np.sqrt(chance * (1 - chance) / count) + 1e-9


@pytest.mark.parametrize(("number", "token"), [(0.2, 0), (0.7, 1)])
def test_what_follows_a_whole_draft_is_the_targets(number: float, token: int) -> None:
    """Nothing is taken off its probabilities, whatever the token before was drawn from."""
    target, drafted = torch.tensor([[[1.0, 0, 0], [1.0, 1.0, 0]]]), torch.tensor([[0]])
    uniform = torch.tensor([[0.5, number]], dtype=torch.float64)
    for draft in (None, torch.tensor([[[1.0, 0, 0]]])):
        found = keep(target, drafted, torch.tensor([1]), draft, uniform)
        assert [one.tolist() for one in found] == [[1], [token]]


def test_lookup_takes_the_longest_and_latest() -> None:
    assert lookup([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 2) == [9, 2]  # three agree
    assert lookup([1, 2, 7, 2, 8, 2], 3) == [8, 2]
    assert lookup([1, 2, 3], 3) == [] == lookup([1], 2)


def test_a_head_that_is_never_accepted_is_told(model: KimiK2ForCausalLM, tmp_path: Path) -> None:
    write_synthetic_head(tmp_path, model.config)
    drafter = HeadDrafter(Eagle3Head.from_pretrained(tmp_path, model))
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    with pytest.warns(KimiK2Warning, match="most likely another model's"):
        speak(Generator(model, drafter=drafter, draft_tokens=1), [[5, 6], [7, 8], [9, 3], [4]], params)


def test_a_drafter_is_given_tokens_of_the_vocabulary_alone() -> None:
    """An image's or a video's may lie beyond it."""
    read: list[list[int]] = []
    step: Any = MagicMock(aux=None)
    drafter: Any = SimpleNamespace(read=lambda following, *_: read.extend(following.tolist()))
    ids = torch.tensor([[5, 500, 499, 501]])
    PromptReader(step, drafter, ids.tolist(), 500)(ids, torch.arange(4)[None], torch.tensor([3]))
    assert read == [[0, 499, 0, 0]]


def test_a_next_turn_is_read_from_where_it_parts(model: KimiK2ForCausalLM) -> None:
    """A kept cache and drafts together: what was rejected is no part of what is kept."""
    params, prompt = SamplingParams(max_new_tokens=7), list(range(5, 25))
    replies = generate(model, [prompt], SamplingParams(max_new_tokens=20))
    generator = Generator(model, keep=True, drafter=Oracle(replies, wrong=0.5))
    reply = speak(generator, [prompt], params)[0]
    prompt = [*prompt, *reply, 7, 8]
    generator.drafter = Oracle(generate(model, [prompt], SamplingParams(max_new_tokens=20)), wrong=0.5)
    assert speak(generator, [prompt], params)[0] == generate(model, [prompt], params)[0]
