"""Layers over batches as engines make them: prompts in parts among decodes, caches spread over ranks.

What a step's layers are told of several prompts, and the plain model's hidden states of each sequence.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kimi_k2.engine import batch
from kimi_k2.engine.batch import Batch, RaggedChunk, by_token
from kimi_k2.engine.layer_step import LayerStep, Reduce, through
from kimi_k2.engine.spread import Spread
from kimi_k2.model.decoder import DecoderLayer, HiddenStates, KimiK2ForCausalLM
from kimi_k2.ops.linear import add_norm
from kimi_k2.serving.paged.heads import kernel_heads, pad_heads

PAGE, PAGES = 4, 40
LENGTHS = (24, 12, 18)
# New tokens of each sequence in each step: whole prompts, parts of them, and single tokens, which come first.
STEPS: list[dict[int, int]] = [
    {0: 10, 1: 9},
    {1: 1, 0: 7, 2: 5},
    {1: 1, 0: 5, 2: 4},
    {0: 1, 1: 1, 2: 6},
    {2: 2},
    {0: 1, 2: 1},
]


class Layers:
    """The layers of a model, or of a rank's part with its sum over ranks, over caches of their own, step by step."""

    def __init__(
        self,
        model: KimiK2ForCausalLM,
        reduce: Reduce = lambda x: x,
        dtype: torch.dtype = torch.float32,
        spread: Spread | None = None,
        drafted: bool = False,
    ) -> None:
        self.model, self.done, self.spread, self.drafted = model, [0] * len(LENGTHS), spread, drafted
        self.states: HiddenStates | None = None
        order = torch.randperm(PAGES)[: len(LENGTHS) * 6].view(len(LENGTHS), 6)
        self.table = order.int()
        self.steps: list[LayerStep] = []
        self.caches: list[Tensor] = []
        for layer in model.model.layers:
            self.caches.append(torch.randn(PAGES, PAGE, model.config.cache_dim).to(dtype))  # what others left
            assert isinstance(layer, DecoderLayer)
            self.steps.append(LayerStep(layer, reduce))

    def step(self, new: dict[int, int], ids: list[Tensor], padding: int) -> dict[int, Tensor]:
        """Hidden states of the new tokens of each sequence."""
        rows, counts = list(new), list(new.values())
        positions = [torch.arange(self.done[row], self.done[row] + count) for row, count in new.items()]
        tables = [self.table[row].long() for row in rows]
        slots = [self.slots(table, at) for table, at in zip(tables, positions, strict=True)]
        for row, count in new.items():
            self.done[row] += count
        starts, lengths = [0, *itertools.accumulate(counts)], [self.done[row] for row in rows]
        decodes, stored = counts.count(1), torch.cat((*slots, torch.full((padding,), -1)))
        given = torch.tensor(starts).int(), torch.tensor(lengths).int()
        if self.drafted:  # all of them are decodes
            seq_lens, table = by_token(*given, self.table[rows], len(stored))
            made = Batch(len(stored), len(stored), seq_lens, stored, table)
        else:
            made = Batch.of_sequences(starts, *given, lengths[decodes:], self.table[rows], stored, PAGE, self.spread)
        for ragged in [one for chunk in made.chunks if isinstance(chunk, RaggedChunk) for one in chunk[1:3]]:
            # As kernels read them; the plain functions read the lengths.
            assert ragged.starts.tolist() == [0, *itertools.accumulate(ragged.lengths)]
            assert ragged.starts.dtype == torch.int32
        seen = list[tuple[int, Tensor]]()
        made.before_attention = made.after_attention = lambda layer: seen.append((layer, self.stored(layer, stored)))
        tokens = torch.cat([ids[row][at] for row, at in zip(rows, positions, strict=True)])
        x = self.model.model.embed_tokens(torch.cat((tokens, tokens.new_zeros(padding))))
        at = torch.cat((*positions, torch.zeros(padding, dtype=torch.int64)))
        made.rotation = self.model.model.rotary(at, x.dtype)
        found = self.run(x, made)
        assert [layer for layer, _ in seen] == sorted([*range(len(self.steps))] * 2)
        for (_, before), (_, behind) in zip(seen[::2], seen[1::2], strict=True):  # as a connector moves caches
            assert (before != behind).any(-1).all()
        return {row: found[start : start + count] for row, start, count in zip(rows, starts, counts, strict=False)}

    def all_steps(self, ids: list[Tensor]) -> list[Tensor]:
        """Hidden states of each sequence, behind `STEPS`; they may be overwritten by another step."""
        found = [list[Tensor]() for _ in LENGTHS]
        for number, new in enumerate(STEPS):
            for row, states in self.step(new, ids, padding=number % 3).items():
                found[row].append(states.clone())
        return [torch.cat(parts) for parts in found]

    def slots(self, table: Tensor, at: Tensor) -> Tensor:
        """As vLLM's block tables say where tokens are stored, -1 for those of another rank."""
        if self.spread is None:
            return table[at // PAGE] * PAGE + at % PAGE
        ranks, run, page = self.spread.ranks, self.spread.run, PAGE * self.spread.ranks
        within = at % page
        slots = table[at // page] * PAGE + within // (ranks * run) * run + within % run
        return torch.where(within // run % ranks == self.spread.rank, slots, -1)

    def stored(self, layer: int, slots: Tensor) -> Tensor:
        """Bytes of a layer's cache at slots."""
        return self.caches[layer].flatten(0, 1)[slots[slots >= 0]].view(torch.uint8)

    def run(self, x: Tensor, made: Batch) -> Tensor:
        """Normed hidden states of embedded tokens."""
        norm = self.model.model.norm
        return add_norm(*through(self.steps, x, made, self.caches, self.states), norm.weight, norm.eps)[1]


def check(model: KimiK2ForCausalLM, heads: int | None = None, distance: float = 2e-5) -> None:
    """Steps of three sequences give the plain model's hidden states, with heads of zeros up to `heads` too."""
    ids = [torch.randint(10, model.config.vocab_size, (length,)) for length in LENGTHS]
    model.prepare()
    layers, all_wanted = Layers(model), list[Tensor]()
    with torch.inference_mode():
        for sequence in ids:
            positions = torch.arange(len(sequence)).unsqueeze(0)
            all_wanted.append(model.model(sequence.unsqueeze(0), positions, None, len(sequence))[0])
        if heads is not None:
            for step in layers.steps:
                own = step.width
                pad_heads(step, heads)
                assert step.width == own // model.config.num_attention_heads * heads
        found = layers.all_steps(ids)
        assert layers.done == list(LENGTHS)
        for wanted, states in zip(all_wanted, found, strict=True):
            atol = distance * float(wanted.abs().max())
            torch.testing.assert_close(states.float(), wanted.float(), rtol=0, atol=atol)
            again = model.model(sequence.unsqueeze(0), positions, None, len(sequence))[0]
    assert torch.equal(again, all_wanted[-1])  # its weights are views now


@pytest.mark.parametrize("together", [True, False], ids=["prompts together", "one by one"])
@pytest.mark.parametrize("name", ["bf16", "thinking"])
def test_prompts_in_parts(
    name: str, together: bool, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not together:
        monkeypatch.setattr(batch, "MOST_SLOTS", 0)
    torch.manual_seed(0)
    check(KimiK2ForCausalLM.from_pretrained(checkpoints[name], keep_quantized=True))


@pytest.mark.parametrize("name", ["bf16", "wide"])
def test_heads_of_zeros(name: str, checkpoints: dict[str, Path], wide: Path) -> None:
    """Projections in floats, and in FP8 of whole blocks."""
    torch.manual_seed(0)
    directory = {**checkpoints, "wide": wide}[name]
    check(KimiK2ForCausalLM.from_pretrained(directory, keep_quantized=True, dtype=torch.float32), heads=8)


def test_heads_that_the_kernels_take() -> None:
    assert [kernel_heads(heads) for heads in (1, 2, 4, 8, 16, 24, 64, 65)] == [8, 8, 8, 8, 16, 32, 64, None]


@torch.inference_mode()
def test_several_new_tokens_are_decodes(checkpoints: dict[str, Path]) -> None:
    """What comes in front of each layer and behind the last, as the plain model's modules are given it."""
    model = KimiK2ForCausalLM.from_pretrained(checkpoints["thinking"], keep_quantized=True)
    model.prepare()
    layers, ids, wanted = Layers(model, drafted=True), torch.randint(10, model.config.vocab_size, (8,)), list[Tensor]()
    for module in (*model.model.layers, model.model.norm):
        module.register_forward_pre_hook(lambda _, given: wanted.append(given[0][0]))
    model.model(ids.unsqueeze(0), torch.arange(8).unsqueeze(0), None, 8)
    found = list[Tensor]()
    for count, padding in ((5, 0), (3, 2)):
        layers.states = HiddenStates(range(len(layers.steps) + 1))
        layers.step({0: count}, [ids], padding)
        found.append(torch.stack(layers.states.apart())[:, :count])
    together = torch.cat(found, dim=1)
    torch.testing.assert_close(together, torch.stack(wanted), rtol=0, atol=2e-5 * float(together.abs().max()))


@pytest.mark.parametrize(("ranks", "run", "dtype", "together"), [
    (2, 1, torch.float32, True),
    (3, 2, torch.float32, False),
    (2, 4, torch.float8_e4m3fn, True),
])  # fmt: skip
def test_caches_spread_over_ranks(
    ranks: int, run: int, dtype: torch.dtype, together: bool, checkpoints: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Every rank, here with all heads, has the hidden states of one rank that holds everything."""
    if not together:
        monkeypatch.setattr(batch, "MOST_SLOTS", 0)
    model = KimiK2ForCausalLM.from_pretrained(checkpoints["thinking"], keep_quantized=True)
    model.prepare()
    ids = [torch.randint(10, model.config.vocab_size, (length,)) for length in LENGTHS]
    meeting, left = threading.Barrier(ranks, timeout=60), dict[int, Tensor]()

    def exchange(rank: int, made: Callable[[list[Tensor]], Tensor], x: Tensor) -> Tensor:
        assert x.dtype != torch.float8_e4m3fn  # which NCCL and gloo have not
        left[rank] = x
        meeting.wait()
        found = made([left[one] for one in range(ranks)])
        meeting.wait()
        return found

    def served(spread: Spread | None) -> list[Tensor]:
        with torch.inference_mode():
            return Layers(model, dtype=dtype, spread=spread).all_steps(ids)

    def one(rank: int) -> list[Tensor]:
        joins = (partial(exchange, rank, made) for made in (torch.cat, lambda x: torch.stack(x).sum(0)))
        try:
            return served(Spread(ranks, rank, run, *joins))
        except BaseException:
            meeting.abort()
            raise

    wanted = served(None)
    with ThreadPoolExecutor(ranks) as pool:
        for found in pool.map(one, range(ranks)):
            for some, states in zip(found, wanted, strict=True):
                torch.testing.assert_close(some, states, rtol=0, atol=1e-5 * float(states.abs().max()))
