"""Layers over batches as engines make them, prompts in parts among decodes: the plain model's hidden states.

vLLM on a CPU takes prompts whole, so the parts that a GPU's come in are made here.
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
from kimi_k2.engine.batch import Batch, by_token
from kimi_k2.engine.layer_step import LayerStep, Reduce, through
from kimi_k2.engine.spread import Gathered, Spread
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
    ) -> None:
        self.model, self.done, self.spread = model, [0] * len(LENGTHS), spread
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
        decodes = counts.count(1)
        made = Batch.of_sequences(
            starts, torch.tensor(starts).int(), torch.tensor(lengths).int(), lengths[decodes:], self.table[rows],
            torch.cat((*slots, torch.full((padding,), -1))), PAGE, self.spread,
        )  # fmt: skip
        tokens = torch.cat([ids[row][at] for row, at in zip(rows, positions, strict=True)])
        x = self.model.model.embed_tokens(torch.cat((tokens, tokens.new_zeros(padding))))
        at = torch.cat((*positions, torch.zeros(padding, dtype=torch.int64)))
        made.rotation = self.model.model.rotary(at, x.dtype)
        found = self.run(x, made)
        return {row: found[start : start + count] for row, start, count in zip(rows, starts, counts, strict=False)}

    def slots(self, table: Tensor, at: Tensor) -> Tensor:
        """As vLLM's block tables say where tokens are stored, -1 for those of another rank."""
        if self.spread is None:
            return table[at // PAGE] * PAGE + at % PAGE
        ranks, run, page = self.spread.ranks, self.spread.run, PAGE * self.spread.ranks
        within = at % page
        slots = table[at // page] * PAGE + within // (ranks * run) * run + within % run
        return torch.where(within // run % ranks == self.spread.rank, slots, -1)

    def run(self, x: Tensor, made: Batch) -> Tensor:
        """Normed hidden states of embedded tokens."""
        norm = self.model.model.norm
        return add_norm(*through(self.steps, x, made, self.caches), norm.weight, norm.eps)[1]


def check(model: KimiK2ForCausalLM, heads: int | None = None, distance: float = 2e-5) -> None:
    """Steps of three sequences give the plain model's hidden states, with heads of zeros up to `heads` too."""
    ids = [torch.randint(10, model.config.vocab_size, (length,)) for length in LENGTHS]
    model.prepare()
    layers, found, all_wanted = Layers(model), [list[Tensor]() for _ in LENGTHS], list[Tensor]()
    with torch.inference_mode():
        for sequence in ids:
            positions = torch.arange(len(sequence)).unsqueeze(0)
            all_wanted.append(model.model(sequence.unsqueeze(0), positions, None, len(sequence))[0])
        if heads is not None:
            for step in layers.steps:
                own = step.width
                pad_heads(step, heads)
                assert step.width == own // model.config.num_attention_heads * heads
        for number, new in enumerate(STEPS):
            for row, states in layers.step(new, ids, padding=number % 3).items():
                found[row].append(states)
        assert layers.done == list(LENGTHS)
        for wanted, parts in zip(all_wanted, found, strict=True):
            atol = distance * float(wanted.abs().max())
            torch.testing.assert_close(torch.cat(parts).float(), wanted.float(), rtol=0, atol=atol)
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
    layers, ids, wanted = Layers(model), torch.randint(10, model.config.vocab_size, (8,)), list[Tensor]()
    for module in (*model.model.layers, model.model.norm):
        module.register_forward_pre_hook(lambda _, given: wanted.append(given[0][0]))
    model.model(ids.unsqueeze(0), torch.arange(8).unsqueeze(0), None, 8)
    found = list[Tensor]()
    for new in (slice(0, 5), slice(5, 8)):
        rows = new.stop - new.start
        starts, lengths = torch.tensor([0, rows]).int(), torch.tensor([new.stop]).int()
        seq_lens, table = by_token(starts, lengths, layers.table[:1], rows)
        places = torch.arange(new.start, new.stop)
        slots = layers.table[0].long()[places // PAGE] * PAGE + places % PAGE
        x = model.model.embed_tokens(ids[new])
        made = Batch(rows, rows, seq_lens, slots, table, rotation=model.model.rotary(places, x.dtype))
        states = HiddenStates(range(len(layers.steps) + 1))
        through(layers.steps, x, made, layers.caches, states)
        found.append(torch.stack(states.apart()))
    together = torch.cat(found, dim=1)
    torch.testing.assert_close(together, torch.stack(wanted), rtol=0, atol=2e-5 * float(together.abs().max()))


@torch.inference_mode()
def test_an_idle_rank_takes_part_in_the_sums_alone(checkpoints: dict[str, Path]) -> None:
    model = KimiK2ForCausalLM.from_pretrained(checkpoints["thinking"], keep_quantized=True)
    sums: list[tuple[int, ...]] = []

    def reduce(x: Tensor) -> Tensor:
        sums.append(tuple(x.shape))
        return x

    layers, none = Layers(model, reduce), torch.zeros(0, dtype=torch.int64)
    before = [cache.clone() for cache in layers.caches]
    idle = Batch(0, 0, none.int(), none, layers.table[:0], rotation=model.model.rotary(none, torch.float32))
    x, delta = through(layers.steps, model.model.embed_tokens(none), idle, layers.caches)
    assert x.shape == delta.shape == (0, model.config.hidden_size)
    assert sums == [(0, model.config.hidden_size)] * 2 * len(layers.steps)
    assert all(torch.equal(*pair) for pair in zip(before, layers.caches, strict=True))


@torch.inference_mode()
def test_a_connector_is_asked_before_and_behind_each_attention(checkpoints: dict[str, Path]) -> None:
    """Before it the cache is as it was, behind it the layer's new tokens are there."""
    model = KimiK2ForCausalLM.from_pretrained(checkpoints["bf16"])
    layers, seen = Layers(model), list[tuple[str, int, bool]]()
    slots = torch.tensor([5, 9, 10, 11])
    starts, table = torch.tensor([0, 1, 4]).int(), torch.tensor([[1, 0], [2, 0]]).int()
    made = Batch.of_sequences([0, 1, 4], starts, torch.tensor([2, 4]).int(), [4], table, slots, PAGE)
    made.rotation = model.model.rotary(torch.tensor([1, 1, 2, 3]), torch.float32)
    before = [cache.clone() for cache in layers.caches]

    def note(what: str, layer: int) -> None:
        changed = (layers.caches[layer] != before[layer]).any(-1).flatten().nonzero().flatten()
        seen.append((what, layer, changed.tolist() == slots.tolist()))

    made.before_attention, made.after_attention = partial(note, "before"), partial(note, "behind")
    through(layers.steps, torch.randn(4, model.config.hidden_size), made, layers.caches)
    both = [(("before", number, False), ("behind", number, True)) for number in range(len(layers.steps))]
    assert seen == [one for pair in both for one in pair]


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
        left[rank] = x
        meeting.wait()
        found = made([left[one] for one in range(ranks)])
        meeting.wait()
        return found

    def served(spread: Spread | None) -> list[dict[int, Tensor]]:
        layers = Layers(model, dtype=dtype, spread=spread)
        with torch.inference_mode():
            return [layers.step(new, ids, padding=number % 3) for number, new in enumerate(STEPS)]

    def one(rank: int) -> list[dict[int, Tensor]]:
        joins = (partial(exchange, rank, made) for made in (torch.cat, lambda x: torch.stack(x).sum(0)))
        try:
            return served(Spread(ranks, rank, run, *joins))
        except BaseException:
            meeting.abort()
            raise

    wanted = served(None)
    with ThreadPoolExecutor(ranks) as pool:
        for found in pool.map(one, range(ranks)):
            for some, step in zip(found, wanted, strict=True):
                assert some.keys() == step.keys()
                for row, states in step.items():
                    atol = 2e-5 * float(states.abs().max())
                    torch.testing.assert_close(some[row], states, rtol=0, atol=atol)


@pytest.mark.parametrize(("dtype", "sent"), [(torch.float8_e4m3fn, torch.uint8), (torch.bfloat16, torch.bfloat16)])
def test_ranks_send_an_fp8_cache_as_bytes(dtype: torch.dtype, sent: torch.dtype) -> None:
    """NCCL and gloo have no FP8."""
    given: list[torch.dtype] = []

    def gather(rows: Tensor) -> Tensor:
        given.append(rows.dtype)
        return torch.cat((rows, rows))

    spread = Spread(2, 0, 1, gather, lambda part: part)
    first = torch.tensor([0])
    gathered = Gathered((first, first), torch.tensor([0, 2]))
    slots = spread.slots(torch.tensor([[[1.0, 2.0]]]).to(dtype), torch.tensor([[3.0, 4.0]]), gathered)
    assert (slots.dtype, slots.float().tolist(), given) == (dtype, [[1, 2], [3, 4]], [sent])
