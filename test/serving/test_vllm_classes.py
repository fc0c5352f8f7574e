"""Our classes as vLLM calls them, without an engine: batches, caches, stages, graphs of prompts, ranks, exchanges."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
import pytest
import torch
from in_workers import Again
from processes import run_together
from safetensors.torch import load_file
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.engine import batch
from kimi_k2.engine.batch import Batch, Chunk
from kimi_k2.engine.prompt_step import padded_width
from kimi_k2.errors import ConfigError, MissingTensorError
from kimi_k2.ops.experts import route
from kimi_k2.serving.paged.model import PagedModel
from kimi_k2.serving.vllm.adapter import Deployment
from kimi_k2.sharding.layout import STORED, Layout
from kimi_k2.sharding.presharder import Presharder

engines.need("vllm")

PAGE = 4
TOKENS, LAYERS = 6, 3
HELD = 12345  # bytes
WORKER = Path(__file__).with_name("rank_worker.py")


def built(starts: Tensor, lengths: Tensor | None, most: int, spread: Any = None, **more: Any) -> Any:
    """The batch that vLLM's builder of ours makes of what the runner says of a step."""
    from kimi_k2.serving.vllm.attention import BatchBuilder

    count = len(starts) - 1
    common = {
        "num_reqs": count, "max_query_len": most, "num_actual_tokens": int(starts[-1]), "query_start_loc": starts,
        "query_start_loc_cpu": starts, "seq_lens": lengths, "block_table_tensor": torch.zeros(count, 8).int(),
        "slot_mapping": torch.arange(int(starts[-1])), "is_prefilling": None,
    }  # fmt: skip
    builder = BatchBuilder.__new__(BatchBuilder)
    builder.kv_cache_spec, builder._spread = SimpleNamespace(block_size=PAGE), spread
    return builder.build(0, SimpleNamespace(**common | more))


@pytest.mark.parametrize("bound", [True, False], ids=["host's copy", "device's"])
def test_what_the_runner_says_of_a_step(bound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two decodes, then two prompts; behind them what the runner's buffers hold of other steps."""
    starts, lengths = torch.tensor([0, 1, 2, 4, 8]).int(), torch.tensor([7, 30, 12, 4, 99]).int()
    monkeypatch.setattr(batch, "MOST_SLOTS", 0)  # prompts one by one
    more = {"seq_lens_cpu_upper_bound": lengths, "seq_lens": lengths.flip(0)} if bound else {}
    made = built(starts, lengths, 4, **more)
    found = [(one.rows, one.sequences, one.length) for one in made.chunks if isinstance(one, Chunk)]
    assert (made.decodes, made.tokens) == (2, 8)
    assert found == [(slice(2, 4), slice(2, 3), 12), (slice(4, 8), slice(3, 4), 4)]
    alone = built(torch.arange(5).int(), None, 1)  # a step of decodes alone reads nothing back
    assert (alone.decodes, alone.tokens, alone.chunks) == (4, 4, ())


def test_lengths_of_what_a_rank_holds() -> None:
    """As vLLM counts them; a step of decodes alone has vLLM's own, for its graphs."""
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens

    from kimi_k2.serving.vllm.ranks import ContextRanks

    lengths = torch.arange(70).int()
    for ranks, run, rank in ((2, 1, 0), (2, 1, 1), (8, 4, 5), (3, 16, 2)):
        spread = ContextRanks(ranks, rank, run, torch.clone, torch.clone)
        assert torch.equal(spread.held(lengths), get_dcp_local_seq_lens(lengths, ranks, rank, run).flatten())
    for local in (lengths.flip(0), None):
        made = built(torch.arange(71).int(), lengths, 1, spread, dcp_local_seq_lens=local)
        assert made.spread is spread and torch.equal(made.seq_lens, spread.held(lengths) if local is None else local)


def held(entered: dict[str, Any], name: str = "one") -> Any:
    from kimi_k2.serving.vllm.attention import LatentAttention

    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=entered))
    return LatentAttention(config, name, cache_dim=3, dtype=torch.float32)


def test_a_layer_and_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entered once; the cache as any version gives it; what it says of it, and what a step computes."""
    from kimi_k2.serving.vllm import attention

    entered: dict[str, Any] = {}
    layer, cache = held(entered), torch.randn(5, PAGE, 3)
    assert layer is entered["one"]
    with pytest.raises(ValueError, match="two layers are called one"):
        held(entered)
    for given in (cache, [cache], (cache,), cache.unsqueeze(1), [cache.unsqueeze(1)]):
        layer.kv_cache = given
        assert (layer.cache.shape, layer.cache.data_ptr()) == (cache.shape, cache.data_ptr())
    # One dictionary by layers' names, or a list of these; none while vLLM measures memory.
    metadata, mine = {"other": object(), "one": object()}, None
    mine = metadata["one"]
    for said, wanted in ((metadata, mine), ([metadata], mine), (None, None), ({}, None)):
        context = SimpleNamespace(attn_metadata=said)
        monkeypatch.setattr(attention, "get_forward_context", lambda context=context: context)
        assert layer.batch() is wanted
    backend = layer.get_attn_backend()
    assert backend is attention.LatentBackend and backend.is_mla()
    assert backend.get_impl_cls() is attention.LatentAttention
    spec = layer.get_kv_cache_spec(SimpleNamespace(cache_config=SimpleNamespace(block_size=64)))
    assert (spec.block_size, spec.num_kv_heads, spec.head_size, spec.dtype) == (64, 1, 3, torch.float32)
    assert backend.get_kv_cache_shape(7, 64, 1, 3) == (7, 64, 3)


class Held:
    """A cache of one page, for one prompt."""

    def __init__(self, config: KimiK2Config) -> None:
        self.cache = torch.zeros(1, TOKENS, config.cache_dim)

    def batch(self) -> Batch:
        places = torch.arange(TOKENS)
        chunk = Chunk(slice(0, TOKENS), slice(0, 1), places.unsqueeze(0), TOKENS, whole=True)
        return Batch(TOKENS, 0, torch.tensor([TOKENS]).int(), places, torch.zeros(1, 1).int(), [chunk])


def stage(directory: Path, layers: range) -> Any:
    """What `forward` reads of our model in vLLM."""
    config, group = KimiK2Config.from_pretrained(directory), torch.distributed.GroupMember.WORLD
    held: Any = [Held(config) for _ in layers]
    given = Layout(1, target="cuda", experts=STORED), 0, group, held, TOKENS, torch.float32, torch.device("cpu")
    paged = PagedModel(config, *given, layers=layers)  # type: ignore[arg-type]
    for file in sorted(directory.glob("*.safetensors")):
        paged.load(load_file(file).items())
    paged.loader.check()
    return SimpleNamespace(
        paged=paged, plain=paged.plain, held=held, embed_input_ids=paged.embed, loras=None, _seen=(),
        _graphs_of=lambda *_: None, _record=lambda x: None,
        _pp=SimpleNamespace(is_first_rank=layers.start == 0, is_last_rank=layers.stop == LAYERS, world_size=2),
    )  # fmt: skip


@pytest.mark.parametrize("cut", [1, 2])
def test_stages_of_a_pipeline(cut: int, checkpoints: dict[str, Path]) -> None:
    """What they hand on makes the whole model's hidden states, to the bit; a layer that has not come is named."""
    from kimi_k2.serving.vllm.model import KimiK2ForVllm

    forward, ids, places = KimiK2ForVllm.forward, torch.randint(10, 700, (TOKENS,)), torch.arange(TOKENS)
    directory = checkpoints["thinking"]
    whole, front, back = (stage(directory, range(*ends)) for ends in ((0, LAYERS), (0, cut), (cut, LAYERS)))
    wanted: Tensor = forward(whole, ids, places)
    assert wanted.shape == (TOKENS, whole.paged.plain.config.hidden_size)
    handed = forward(front, ids, places)
    assert sorted(handed.tensors) == ["hidden_states", "residual"]
    assert torch.equal(forward(back, None, places, handed), wanted)
    assert torch.equal(back.paged.logits(wanted), whole.paged.logits(wanted))
    assert [len(one.paged.steps) for one in (front, back)] == [cut, LAYERS - cut]
    back.paged.loader.filled = {name: count * (".2." not in name) for name, count in back.paged.loader.filled.items()}
    with pytest.raises(MissingTensorError, match=r"model\.layers\.2\."):
        back.paged.loader.check()


def test_layers_that_the_target_lacks() -> None:
    from kimi_k2.serving.vllm.model import KimiK2ForVllm

    target: Any = SimpleNamespace(config=SimpleNamespace(num_hidden_layers=3))
    KimiK2ForVllm.set_aux_hidden_state_layers(target, (3, 0, 3))
    assert target._seen == (0, 3)
    with pytest.raises(ConfigError, match=r"eagle_aux_hidden_state_layer_ids': \[4\], of a target with 3 layers"):
        KimiK2ForVllm.set_aux_hidden_state_layers(target, (1, 4))


class OnGpu(torch.Tensor):
    """Says that it is there."""

    is_cuda = property(lambda self: True)


class Nccl:
    """vLLM's group of two ranks with the same rows; as NCCL does, it reads the values that follow a tensor's first."""

    rank_in_group = 1

    def all_gatherv(self, tensors: list[Tensor], dim: int, sizes: list[int]) -> list[Tensor]:
        rows = [one.as_strided(one.shape, (one.shape[1], 1), one.storage_offset()) for one in tensors]
        return [torch.cat((one, one), dim) for one in rows]


def test_rows_as_nccl_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain router's experts are a view of all experts' order."""
    from kimi_k2.serving.vllm import ranks

    monkeypatch.setattr(ranks, "get_dp_group", Nccl)
    monkeypatch.setattr(ranks.Exchange, "_sizes", staticmethod(lambda: [5, 5]))
    x = torch.randn(5, 32)
    indices, weights = route(x, torch.randn(16, 32), torch.zeros(16), 8)
    assert not indices.is_contiguous()
    given: list[Tensor] = [one.as_subclass(OnGpu) for one in (x, indices, weights)]
    for found, wanted in zip(ranks.Exchange().gather(given), (x, indices, weights), strict=True):
        assert torch.equal(found, torch.cat((wanted, wanted)))


@pytest.mark.parametrize(("name", "redundant"), [("thinking", 0), ("wide", 2)])
def test_experts_moved(name: str, redundant: int, checkpoints: dict[str, Path], wide: Path, tmp_path: Path) -> None:
    """By vLLM's own balancer: layers compute what they did. INT4; FP8 blocks, some experts held twice."""
    given = tmp_path / "meeting", {**checkpoints, "wide": wide}[name], redundant
    run_together([[sys.executable, WORKER, "balanced", rank, *given] for rank in range(2)], timeout=300)


@pytest.mark.parametrize(("moe_tp", "moe_ep"), [(2, 1), (1, 2)], ids=["cut", "shared out"])
def test_steps_with_prompts_of_two_ranks(
    moe_tp: int, moe_ep: int, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Replayed on both or on neither: the plain model's hidden states."""
    source, converted, out = checkpoints["thinking"], tmp_path / "ranks", tmp_path / "out"
    Presharder(source, converted, Layout(moe_tp, moe_ep, target="cuda", experts=STORED)).run()
    given = out, source, converted, moe_tp, moe_ep
    run_together([[sys.executable, WORKER, "replayed", rank, *given] for rank in range(2)], timeout=300)
    first, second = (torch.load(f"{out}-{rank}") for rank in range(2))
    reasons = [[reason for reason, _ in one["refused"]] for one in (first, second)]
    assert reasons[0] == ["48 tokens: another rank cannot"] * 2
    assert reasons[1] == ["48 tokens: cannot be recorded", "48 tokens: does not take it"]
    for one in (first, second):  # sums are made where all ranks are, none in what one of them may not reach
        for _, sums in one["refused"]:
            assert [shape[0] for shape in sums] == [64, 48, 32, 16]
        assert one["replays"] == 5
        assert max(one["errors"]) < 2e-5


class Graphs:
    """Stands for graphs of steps with prompts, and for their recorder: keeps for how many tokens they were asked."""

    fails = False

    def __init__(self, *given: Any) -> None:
        self.widest, self.widths = given[2] if len(given) > 1 else 0, [1]

    def capture(self) -> str | None:
        return "operation not permitted when stream is capturing" if self.fails else None

    def held(self) -> int:
        return HELD


@pytest.mark.parametrize(
    ("changed", "others", "widest"),
    [
        ({}, None, 4096),  # or what a step has at most; the environment says otherwise
        ({"max_num_batched_tokens": 2048}, None, 2048),
        ({"asked": "512"}, None, 512),
        ({"asked": "0"}, None, None),
        ({}, 4096, 4096),  # several ranks make those of the rank that wants the fewest
        ({}, 1024, 1024),
        ({}, 8192, 4096),
        ({}, 0, None),
        ({"enforce_eager": True}, None, None),
        ({"cudagraph_mode": SimpleNamespace(name="NONE")}, None, None),
        ({"is_cuda": False}, None, None),
        ({"fails": True}, None, None),  # such steps are then launched one by one
    ],
)
def test_which_prompts_are_in_graphs(
    changed: dict[str, Any],
    others: int | None,
    widest: int | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What a deployment asks for decides; `others` are the tokens up to which another rank wants graphs."""
    from kimi_k2.serving.vllm import prompt_graphs as module

    monkeypatch.setattr(module, "least_of_ranks", lambda number: number if others is None else min(number, others))
    for name in ("GraphRecorder", "PromptGraphs"):
        monkeypatch.setattr(module, name, Graphs)
    monkeypatch.setattr(Graphs, "fails", changed.get("fails", False))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    if "asked" in changed:
        monkeypatch.setenv("KIMI_K2_VLLM_GRAPH_TOKENS", changed["asked"])
    fields = {"max_num_batched_tokens": 8192, "enforce_eager": False, "is_cuda": True}
    one: Any = SimpleNamespace(**{"cudagraph_mode": SimpleNamespace(name="FULL_AND_PIECEWISE"), **fields, **changed})
    for part in ("compilation_config", "scheduler_config", "model_config", "weight"):
        setattr(one, part, one)
    with caplog.at_level(logging.WARNING):
        graphs, bytes_held = module.prompt_graphs([], one, Deployment(one))
    assert (graphs and graphs.widest, bytes_held) == (widest, HELD if widest else 0)
    said = "launched one by one: no graph of them: operation not permitted when stream is capturing"
    assert (said in caplog.text) == ("fails" in changed)


class Layer:
    """Stands for a layer: its attention puts what it is given into the first rows, and keeps what all rows held."""

    width = 6

    def __init__(self) -> None:
        self.reduce = lambda x: x
        self.layer = SimpleNamespace(mlp=None)
        self.attention = SimpleNamespace(config=SimpleNamespace(hidden_size=4, qk_rope_head_dim=2))
        self.enter = lambda x, delta: (x, x)
        self.expand = lambda qkv_a, rotation: (qkv_a, qkv_a)
        self.rows: list[Tensor] = []

    def leave(self, x: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self.rows.append(torch.cat([x, values], dim=1))
        return x, x

    def attend(self, qkv_a: object, made: object, batch: Any, cache: object, values: Tensor) -> None:
        values[: batch.tokens] = batch.tokens


def test_padding_is_the_same_whatever_ran_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps of one size, the first with more tokens: rows behind the second's are zero again."""
    from kimi_k2.serving.vllm import prompt_graphs as module

    monkeypatch.setattr(module, "add_norm", lambda x, delta, weight, eps: (x, x))
    layer, norm, wide = Layer(), SimpleNamespace(weight=torch.zeros(4), eps=1e-6), padded_width(200)
    graphs = module.PromptGraphs([layer], norm, wide, Again())  # type: ignore[list-item, arg-type]
    graphs.capture()
    for tokens in (wide, wide - 5):
        step: Any = SimpleNamespace(rotation=(torch.ones(tokens, 1), torch.ones(tokens, 1)), tokens=tokens)
        assert graphs(torch.full((tokens, 4), 7.0), step, [torch.empty(0)]).shape == (tokens, 4)
    last = layer.rows[-1]
    assert last.shape == (wide, 10)
    assert last[: wide - 5].count_nonzero() == (wide - 5) * 10
    assert not last[wide - 5 :].any()
