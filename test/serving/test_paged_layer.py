"""Layers over batches as engines make them: prompts in parts among decodes, adapters, caches spread over ranks.

What a step's layers are told of several prompts, and the plain model's hidden states of each sequence.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kimi_k2.engine import batch
from kimi_k2.engine.batch import Batch, Chunk, RaggedChunk, by_token
from kimi_k2.engine.layer_step import LayerStep, Reduce, through
from kimi_k2.engine.spread import Gathered, Spread
from kimi_k2.model.decoder import DecoderLayer, HiddenStates, KimiK2ForCausalLM
from kimi_k2.ops.linear import add_norm
from kimi_k2.ops.mla import gather_pages
from kimi_k2.serving.paged.adapted import EXPERTS, PROJECTIONS, AdaptedStep, Adapters, LowRank
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

    def run(self, x: Tensor, made: Batch) -> Tensor:
        """Normed hidden states of embedded tokens."""
        norm = self.model.model.norm
        return add_norm(*through(self.steps, x, made, self.caches), norm.weight, norm.eps)[1]


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


def batch_of(new: list[int], lengths: list[int], decodes: int) -> Batch:
    starts = [0, *itertools.accumulate(new)]
    table = (torch.randperm(60) + 1)[: 6 * len(new)].view(len(new), 6).int()
    slots = [
        table[row, place // PAGE] * PAGE + place % PAGE
        for row, (count, length) in enumerate(zip(new, lengths, strict=True))
        for place in range(length - count, length)
    ]
    return Batch.of_sequences(
        starts, torch.tensor(starts).int(), torch.tensor(lengths).int(), lengths[decodes:], table, torch.tensor(slots),
        PAGE,
    )  # fmt: skip


@pytest.mark.parametrize(("new", "lengths"), [([1, 1, 3, 5, 2], [9, 4, 12, 5, 20]), ([2, 7, 3], [2, 9, 17])])
def test_slots_of_sequences_whose_tokens_are_not_all_new(new: list[int], lengths: list[int]) -> None:
    torch.manual_seed(sum(new))
    decodes = new.count(1)
    made = batch_of(new, lengths, decodes)
    (together,) = made.chunks
    assert isinstance(together, RaggedChunk)
    assert together.places is not None and made.block_table is not None
    assert (made.decodes, made.tokens, together.rows) == (decodes, sum(new), slice(decodes, sum(new)))
    cache = torch.randn(61, PAGE, 3)
    table = made.block_table[decodes:]
    wanted = [gather_pages(cache, table[row : row + 1], length)[0] for row, length in enumerate(lengths[decodes:])]
    assert torch.equal(cache[together.places], torch.cat(wanted))
    assert together.queries.lengths == tuple(new[decodes:])
    assert together.queries.starts.tolist() == [0, *itertools.accumulate(new[decodes:])]
    assert together.keys.lengths == tuple(lengths[decodes:])
    assert together.keys.starts.tolist() == [0, *itertools.accumulate(lengths[decodes:])]
    assert together.keys.starts.dtype == together.queries.starts.dtype == torch.int32


def test_whole_prompts_need_no_slots() -> None:
    (together,) = batch_of([1, 3, 5], [4, 3, 5], 1).chunks
    assert isinstance(together, RaggedChunk)
    assert together.places is None
    assert together.keys is together.queries


def test_one_prompt_and_very_long_ones_are_taken_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    (alone,) = batch_of([1, 3], [4, 9], 1).chunks
    assert isinstance(alone, Chunk) and alone.positions.tolist() == [[6, 7, 8]]
    assert alone[:2] == (slice(1, 4), slice(1, 2)) and alone[3:] == (9, True)
    monkeypatch.setattr(batch, "MOST_SLOTS", 13)
    apart = batch_of([3, 2], [9, 5], 0).chunks
    assert [(one.rows, type(one)) for one in apart] == [(slice(0, 3), Chunk), (slice(3, 5), Chunk)]


def test_several_new_tokens_as_sequences_of_their_own() -> None:
    """Behind them a sequence without a token, and two rows of padding."""
    starts, lengths = torch.tensor([0, 3, 4, 6, 6]).int(), torch.tensor([9, 1, 2, 0]).int()
    table = torch.arange(8).view(4, 2).int()
    seq_lens, tables = by_token(starts, lengths, table, 8)
    assert seq_lens.tolist() == [7, 8, 9, 1, 1, 2, 0, 0]
    assert tables[:6, 0].tolist() == [0, 0, 0, 2, 4, 4]
    assert seq_lens.dtype == tables.dtype == torch.int32


SLOTS, RANK = 3, 6
HELD = {1: 2, 2: 0}  # the slot of the second and the third sequence; the first has no adapter


def zeros(rows: int, columns: int, *experts: int) -> LowRank:
    return LowRank(torch.zeros(SLOTS, *experts, RANK, columns), torch.zeros(SLOTS, *experts, RANK, rows))


class Adapted(Layers):
    """With adapters in slots, each of them in a directory."""

    def __init__(self, model: KimiK2ForCausalLM, directories: dict[int, Path]) -> None:
        super().__init__(model)
        self.adapters = Adapters(SLOTS, torch.empty(0))
        for number, layer in enumerate(model.model.layers):
            assert isinstance(layer, DecoderLayer)
            added: dict[str, LowRank] = {}
            experts: dict[str, LowRank] = {}
            touched: set[int] = set()
            for slot, directory in directories.items():
                about = json.loads((directory / "adapter_config.json").read_text())
                tensors = load_file(directory / "adapter_model.safetensors")
                prefix = f"base_model.model.model.layers.{number}."
                for name, a in tensors.items():
                    if not name.startswith(prefix) or ".lora_A." not in name:
                        continue
                    b = tensors[name.replace(".lora_A.", ".lora_B.")] * (about["lora_alpha"] / about["r"])
                    module = name.removeprefix(prefix).removesuffix(".lora_A.weight")
                    sizes = len(b), a.shape[1]
                    if not module.startswith(f"{EXPERTS}."):
                        added.setdefault(module, zeros(*sizes)).put(slot, a, b)
                        continue
                    expert, projection = module.removeprefix(f"{EXPERTS}.").split(".")
                    touched.add(slot)
                    held = experts.setdefault(projection, zeros(*sizes, model.config.n_routed_experts))
                    held.expert(int(expert)).put(slot, a, b)
            assert experts.keys() in ({}.keys(), set(PROJECTIONS))
            self.steps[number] = AdaptedStep(layer, lambda x: x, self.adapters, added, experts, touched)

    def step(self, new: dict[int, int], ids: list[Tensor], padding: int) -> dict[int, Tensor]:
        host = [HELD.get(row, -1) for row, count in new.items() for _ in range(count)]
        self.adapters.tell(host, torch.tensor([*host, *[1] * padding]))  # behind them what the buffer held
        return super().step(new, ids, padding)


@pytest.mark.parametrize("name", ["bf16", "thinking"])
def test_each_sequence_has_its_own(name: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """One adapter touches everything that may be, the other all but routed experts; one sequence has none."""
    from adapters import merge, write_adapter  # of which ranks' processes know nothing

    model = KimiK2ForCausalLM.from_pretrained(checkpoints[name], dtype=torch.float32)
    rows = {
        1: write_adapter(model, tmp_path / "all", 6, 1),
        2: write_adapter(model, tmp_path / "s", 4, 2, experts=False),
    }
    ids = [torch.randint(10, model.config.vocab_size, (length,)) for length in LENGTHS]
    with torch.inference_mode():
        layers = Adapted(model, {HELD[row]: directory for row, directory in rows.items()})
        found = layers.all_steps(ids)
        base = []
        for row, sequence in enumerate(ids):
            plain = KimiK2ForCausalLM.from_pretrained(checkpoints[name], dtype=torch.float32)
            given = sequence.unsqueeze(0), torch.arange(len(sequence)).unsqueeze(0), None, len(sequence)
            base.append(plain.model(*given)[0])
            if row in rows:
                merge(plain, rows[row])
            wanted = plain.model(*given)[0]
            assert torch.allclose(base[-1], wanted, rtol=0, atol=0.01) == (row not in rows)
            torch.testing.assert_close(found[row], wanted, rtol=0, atol=5e-5 * float(wanted.abs().max()))
