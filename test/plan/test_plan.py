"""The planner against what others published, against the presharder's files, and where it must refuse."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command import kimi
from safetensors import safe_open

from kimi_k2.checkpoint.reader import CheckpointReader
from kimi_k2.cli.commands.plan import _index
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError, CorruptHeaderError
from kimi_k2.plan.cost import (
    LONG_PROMPT,
    Collective,
    GraphCounts,
    _expert_flops,
    decode_counts,
    prefill_counts,
    prefill_instructions,
    roofline,
)
from kimi_k2.plan.deployment import Deployment, Target, load_target
from kimi_k2.plan.machines import GIB, Machine
from kimi_k2.plan.memory import (
    WEIGHTS,
    _experts_prefill,
    advice,
    expert_blocks,
    longest_context,
    longest_context_with_scratch,
    memory_plan,
    reported_scratch,
)
from kimi_k2.plan.report import plan
from kimi_k2.plan.torch_native import blocks_of
from kimi_k2.sharding.layout import Layout
from kimi_k2.sharding.presharder import Presharder


@pytest.fixture(scope="module")
def config() -> KimiK2Config:
    return KimiK2Config.from_preset("kimi-k2-instruct-0905")


def target_of(config: KimiK2Config, layout: Layout) -> Target:
    return replace(load_target("h200-tp1", config), layout=layout, context=64, prompt=64)


def test_scratch_is_the_reported_one_at_the_reported_lengths_and_marked_beyond() -> None:
    for context, gib in ((128, 3.0), (512, 4.1), (1024, 5.5)):
        assert reported_scratch(context).nbytes / GIB == pytest.approx(gib)
    assert reported_scratch(4096).longest == 1024
    assert reported_scratch(4096).nbytes > reported_scratch(1024).nbytes


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("fp8", Layout(2, 2, experts="blockwise")),
        ("fp8", Layout(2, 1, experts="per_channel")),
        ("thinking", Layout(1, 2, experts="bf16")),
        ("fp8", Layout(1, 1, "cuda", "stored")),
        ("thinking", Layout(1, 1, "cuda", "stored")),
    ],
)
def test_weights_are_the_bytes_that_the_presharder_writes(
    checkpoints: dict[str, Path], tmp_path: Path, name: str, layout: Layout
) -> None:
    Presharder(checkpoints[name], tmp_path, layout).run()
    plan = memory_plan(target_of(KimiK2Config.from_pretrained(checkpoints[name]), layout))
    weights = sum(plan.parts.get(name, 0) for name in WEIGHTS)
    files = sorted(tmp_path.rglob("*.safetensors"))
    assert len(files) == layout.ranks
    for path in files:
        with safe_open(path, framework="pt") as file:
            assert weights == sum(file.get_tensor(key).nbytes for key in file.keys())  # noqa: SIM118


def test_active_parameters_are_what_a_decode_step_reads(config: KimiK2Config) -> None:
    """FACTS: 42.2 GB for one token with FP8 experts and BF16 rest; the cache and one embedding row come on top."""
    target = replace(load_target("h200-tp1", config), layout=Layout(1, 1, "cuda", "bf16"), context=1)
    counts = decode_counts(target)
    experts = counts.bytes_read(r"\.mlp\.experts\.") / 2  # in FP8
    router = counts.bytes_read(r"\.mlp\.gate\.")
    # Active: 32.86 billion parameters, an embedding of 163840 x 7168 excluded from what is read.
    rest = counts.bytes_read() - 2 * experts
    assert (experts + rest) / 1e9 == pytest.approx(42.2, rel=0.01)
    assert router / 2 == pytest.approx(60 * 384 * 7168, rel=1e-3)


def test_roofline_adds_communication_to_the_larger_of_memory_and_compute() -> None:
    machine, counts = Machine("unit", 1.0, 1.0, 1.0, 1000.0, "invented"), GraphCounts(Counter(weight=144), flops=384)
    # A ring all-reduce of 96 bytes over 4 ranks moves 2 * 3/4 of them. A reduce-scatter's result is one rank's share of
    # what it moves; an all-gather's is the whole.
    for kind, moved in (("all-reduce", 144), ("reduce-scatter", 96 * 4 * 3 / 4), ("all-gather", 96 * 3 / 4)):
        modelled = roofline(replace(counts, collectives=Counter({Collective(kind, 4, 96): 2})), machine)
        assert (modelled.memory, modelled.compute, modelled.communication) == (144, 384, 2 * (moved + 1000))
        assert modelled.bound == 384 + modelled.communication


def test_experts_that_a_gpu_reads_are_the_distinct_ones(config: KimiK2Config) -> None:
    generator = np.random.default_rng(0)
    target = load_target("h200-tp8", config)
    held = decode_counts(target).held
    for batch in (1, 16, 128):
        drawn = [len({e for _ in range(batch) for e in generator.choice(384, 8, replace=False)}) for _ in range(40)]
        counts = decode_counts(replace(target, batch=batch))
        name = "model.layers.1.mlp.experts.gate_up_proj"
        assert counts.read[name] / held[name] == pytest.approx(np.mean(drawn) / 384, rel=0.02)


def test_arrangement_of_the_published_port_costs_more(config: KimiK2Config) -> None:
    ours = load_target("trn2-tp32-ep2", config)
    theirs = replace(ours, published_port=True)
    read_ours, read_theirs = (decode_counts(target, 512).bytes_read() for target in (ours, theirs))
    assert read_theirs > 10 * read_ours  # all 192 local experts instead of 8
    once = 61 * 576 * 2 * ours.batch * 512  # its keys and its values are two caches
    assert [decode_counts(target, 512).read["cache"] for target in (ours, theirs)] == [once, 2 * once]
    extra = memory_plan(theirs).resident - memory_plan(ours).resident
    assert extra > 2 * 2**30


def test_what_does_not_fit_gets_advice_that_does(config: KimiK2Config) -> None:
    bf16 = replace(load_target("trn2-tp64-ep1", config), layout=Layout(64, 1, experts="bf16"))
    plan = memory_plan(bf16)
    assert not plan.fits
    found = advice(plan)
    assert any("per_channel" in line for line in found)
    assert any("blockwise" in line for line in found)
    four = load_target("h200-tp4", config)
    assert any(line.startswith("8 ranks") for line in advice(memory_plan(four)))
    one_host = replace(four, layout=Layout(8, 1, "cuda", "bf16"))
    assert any("stored" in line or "own format" in line for line in advice(memory_plan(one_host)))


def test_int4_experts_in_fp8_say_how_far_they_are() -> None:
    """Relative L2 of rounding to three bits behind the leading one: about a quarter of 2^-3 in the worst place."""
    report = plan("kimi-k2-thinking", "trn2-tp64-ep1-nki-layers")
    form = report["stored_form"]
    assert 0.024 < form["relative_l2"] < 0.029
    assert report["rank_memory"]["fits"]
    assert plan("kimi-k2-instruct-0905", "trn2-tp64-ep1-nki-layers")["stored_form"] is None


def test_longest_context_is_the_last_that_fits(config: KimiK2Config, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target("trn2-tp32-ep2", config)
    beside = longest_context_with_scratch(memory_plan(target))
    assert beside is not None
    for context, enough in ((beside, True), (beside + 1, False)):
        planned = memory_plan(replace(target, context=context))
        assert planned.scratch is not None
        assert (planned.scratch.reported.nbytes <= planned.room) is enough
    length = longest_context(memory_plan(target))
    assert memory_plan(replace(target, context=length)).fits
    assert not memory_plan(replace(target, context=length + 1)).fits
    too_long = replace(target, context=length + 1)
    assert any(f"{length:,}" in line for line in advice(memory_plan(too_long)))
    monkeypatch.setattr("kimi_k2.plan.memory.longest_context", lambda *_: 1)
    assert any("at most 1 tokens" in line for line in advice(memory_plan(too_long)))


def test_command_prints_json_and_writes_the_chart(tmp_path: Path) -> None:
    chart = tmp_path / "plan.png"
    result = kimi("plan", "kimi-k2.5", "--preset", "h200-tp8", "--json", "--chart", chart)
    report = json.loads(result.output)
    assert report["schema"] == "kimi-k2/plan/3"
    assert report["rank_memory"]["fits"]
    assert report["rank_memory"]["resident"] == sum(report["rank_memory"]["parts"].values())
    assert chart.read_bytes().startswith(b"\x89PNG")
    tables = kimi("plan", "kimi-k2-instruct-0905", "--verbose", env={"COLUMNS": "160"})
    for word in ("expert weights", "KV cache", "TPOT / TTFT, modelled", "17.55", "165.5", "6.99 ms a token"):
        assert word in tables.output


def test_index_is_read_without_its_shards(thinking: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors.index.json"):
        (tmp_path / name).write_bytes((thinking / name).read_bytes())
    stated = _index(tmp_path)
    assert stated is not None
    shards = list(thinking.glob("*.safetensors"))
    assert stated["shards"] == len(shards)
    tensors = CheckpointReader(thinking).total_bytes
    assert stated["total_size"] == tensors
    for size in ("1e999", "NaN", '"x"', "-5", "[1]", "null", "true"):
        index = f'{{"metadata": {{"total_size": {size}}}, "weight_map": {{"a": "b.safetensors"}}}}'
        (tmp_path / "model.safetensors.index.json").write_text(index)
        assert _index(tmp_path) == {"total_size": None, "shards": 1, "tensors": 1}
    for text, says in (
        ('{"weight_map": [', "not valid JSON"),
        ('{"weight_map": ["a.safetensors"]}', "expected a non-empty object 'weight_map'"),
        ('{"weight_map": {"norm": "model-\u00b2-of-3"}}', "expected the name of a .safetensors file"),
    ):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(CorruptHeaderError, match=says):
            _index(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert _index(tmp_path) is None


@pytest.mark.parametrize(
    ("preset", "lengths", "says"),
    [
        ("trn3", {}, "no preset 'trn3'"),
        ("three.yaml", {}, "does not divide among 3 ranks"),
        ("trn2-tp32-ep2", {"context": 0}, "max_model_len"),
        ("trn2-tp32-ep2", {"batch": 2**31}, "batch_size.*from 1 to 2147483647"),
        ("trn2-tp32-ep2", {"context": 128, "prompt": 256}, "prompt_length.*at most the context"),
        ("trn2-tp32-ep2-nki-layers", {"context": 1000}, "seq_len.*1000 tokens do not divide into 256"),
    ],
)
def test_wrong_requests_are_named(
    config: KimiK2Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    preset: str,
    lengths: dict[str, int],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    degrees = "tp_degree: 3\nmoe_tp_degree: 3\nbatch_size: 1\nseq_len: 64\nmax_context_length: 64\n"
    Path("three.yaml").write_text(f"instance: h200\nexperts: stored\n{degrees}")
    with pytest.raises(ConfigError, match=says):
        target = load_target(preset, config)
        target = target.with_lengths(lengths.get("context"), lengths.get("batch"), lengths.get("prompt"))
        memory_plan(target)


def test_prefill_instructions_are_at_least_its_arithmetic(config: KimiK2Config) -> None:
    """An instruction multiplies 128 x 128 by at most 512 columns; where every tile is full it does no more."""
    for name in ("trn2-tp32-ep2", "trn2-tp64-ep1-32k", "trn2-tp64-ep1-nki-layers"):
        target = load_target(name, config)
        counted = prefill_instructions(target)
        assert counted is not None
        assert counted["total"] > prefill_counts(target).flops / (2 * 128 * 128 * 512)
        # Blocks of 128 tokens, 2 x 64 and 2 x 32 columns: 56 instructions of gate and up, 56 of down.
        blocks = expert_blocks(target, target.prompt)
        assert counted["matmuls"]["routed experts"] == 60 * 112 * blocks
        # Each choice's token, an int64, is read and written.
        moved = prefill_counts(target).moved
        assert moved["scatter"] == 60 * target.prompt * 8 * 2 * 8, name
        assert counted["limit"] > counted["total"]
        # compile raises the limit where the matrix multiplies alone are more than the compiler's 5 million.
        told = Deployment.load(name).max_context_length > LONG_PROMPT
        assert told == (counted["total"] > 5e6) == (counted["limit"] > 5e6)
    assert prefill_instructions(load_target("h200-tp8", config)) is None


def test_few_tokens_load_their_own_experts(config: KimiK2Config) -> None:
    """NxDI's rule: blocks from where the choices are as many as the experts, 48 x 8; before, experts as chosen."""
    target = load_target("trn2-tp64-ep1", config)
    assert target.block_size is not None and target.block_size <= 47 * 8
    assert [expert_blocks(target, tokens) > 0 for tokens in (16, 47, 48, 64)] == [False, False, True, True]


def test_whole_layers_fold_the_next_projection_into_the_experts(config: KimiK2Config) -> None:
    """An expert's second matrix has the columns of the next layer's q_a and kv_a beside its own."""
    target = load_target("trn2-tp64-ep1-nki-layers", config)
    fewer = replace(target, config=config.model_copy(update={"num_hidden_layers": 60}))
    more = [_expert_flops(model, target.batch, decode=True) for model in (target, fewer)]
    rows, width = target.batch * config.num_experts_per_tok, config.moe_intermediate_size // 64
    assert more[0] - more[1] == rows * 2 * width * (3 * 7168 + 1536 + 512 + 64)


def test_blocks_of_the_torch_native_line_take_any_routing() -> None:
    draw = np.random.default_rng(45)
    for pairs, experts in ((1, 1), (1, 24), (128, 3), (129, 3), (1000, 8), (4096, 12)):
        blocks = blocks_of(pairs, 10**6, experts)
        counts = [np.bincount(draw.integers(0, draw.integers(1, experts + 1), pairs)) for _ in range(50)]
        assert blocks >= max(int(np.ceil(count / 128).sum()) for count in counts)
        assert blocks <= pairs / 128 + experts + 1


def test_prefill_of_the_torch_native_line_holds_every_choice(config: KimiK2Config) -> None:
    """Before and after it is float32, whatever else is alive."""
    target = load_target("trn2-native-tp4-ep16", config)
    choices = target.prefill_sequences * target.prompt * config.num_experts_per_tok
    assert _experts_prefill(target) >= choices * config.hidden_size * (2 + 4)
