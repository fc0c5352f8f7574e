"""The real graphs at Kimi-K2's shapes, two layers (one dense, one with experts), lowered on this machine.

KIMI_K2_SLOW lowers every Trainium preset for each stored form; graphs with images are test_compile_images.py's.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from graphs import DECODE, MEMBER, PREFILL, counted, fetches, graph_of, kernels, of_experts, of_folder, planned, stale
from harness import SLOW, launch
from hlo import entry_instructions

from kimi_k2.config import KimiK2Config
from kimi_k2.plan.deployment import Deployment, preset_names
from kimi_k2.sharding.plan import make_plan

STORED = {  # members by what they store: FP8 blocks, and INT4
    MEMBER: ("kimi-k2-instruct", MEMBER),
    "kimi-k2-thinking": ("kimi-k2-thinking", "kimi-k2.5", "kimi-k2.6", "kimi-k2.7-code"),
}
PRESETS = [
    name for name in preset_names() if name.startswith("trn2") and Deployment.load(name).torch_native is None
]  # fmt: skip
LAYERS, SPLIT = "trn2-tp32-ep2-nki-layers", "trn2-tp64-ep1-nki-layers-128k"
QUICK = {
    *((name, MEMBER, stage) for name in ("trn2-tp32-ep2", "trn2-tp64-ep1") for stage in (DECODE, PREFILL)),
    *((name, MEMBER, DECODE) for name in ("trn2-tp64-ep1-128k", "trn2-tp64-ep1-b8", "trn2-tp64-ep1-nki-layers")),
    *((name, MEMBER, stage) for name in (LAYERS, SPLIT) for stage in (DECODE, PREFILL)),
    *((name, "kimi-k2-thinking", DECODE) for name in (LAYERS, "trn2-tp64-ep1-b32-4k", "trn2-tp32-ep2-1k")),
}


def test_members_of_a_stored_form_have_one_plan() -> None:
    """So that graphs of one member of each say what those of all cost."""
    layout = Deployment.load(LAYERS)
    for stored, members in STORED.items():
        plans = [make_plan(config, layout.layout(config)).tensors for config in map(KimiK2Config.from_preset, members)]
        assert all(plan == plans[0] for plan in plans), stored


@pytest.mark.parametrize(("preset", "stored", "stage"), [
    pytest.param(*case, marks=() if case in QUICK else SLOW)
    for name in PRESETS if "images" not in name for stored in STORED for stage in (DECODE, PREFILL)
    for case in [(name, stored, stage)]
])  # fmt: skip
def test_graphs_cost_what_the_planner_says(preset: str, stored: str, stage: str) -> None:
    whole = stage == DECODE and Deployment.load(preset).neuron_config.decode == "layers"
    layers = 3 if whole else 2  # one dense, and of those with experts two where the kernel takes them
    graph = graph_of(preset, stage, layers, stored)
    found, plan = counted(graph), planned(preset, graph, layers, stored)
    for what in ("weight_bytes_held", "weight_bytes_read", "routed_expert_bytes_read"):
        assert found[what] == pytest.approx(plan[what], rel=1e-3), what
    assert sorted(map(str, found["collectives"])) == sorted(map(str, plan["collectives"]))
    # Scratch is planned as no less than what is alive at once in the graph, and not much more.
    assert found["live"] <= plan["live"]
    assert kernels(graph) == ({"decode_layers": 1} if whole else {})
    # What chooses blocks and experts, and a kernel's DMA, move a little too: of eight lines 2.85 MB.
    assert found["bytes_moved"] == pytest.approx(plan["bytes_moved"], rel=1e-3, abs=3e6)
    if stored != MEMBER or (preset, stored, stage) not in QUICK:
        return
    if not whole:
        assert plan["live"] <= 1.25 * found["live"]
        assert found["flops"] == plan["flops"]
        return
    # Of the kernel the DMA and the collectives inside are counted.
    assert found["bytes_moved"] < (500_000 if preset == SPLIT else 400_000)
    sums = {(collective["kind"], collective["bytes"]): collective["times"] for collective in found["collectives"]}
    if preset == SPLIT:  # an all-to-all brings a rank its head's parts, made of queries of 16 heads in FP8
        assert sums["all-to-all", 16 * 2 * 513 * 4] == 2
        assert fetches(graph)["ahead"] > 2 * 16 * (1536 * 192 + 512 * 128)
    else:
        # Both cores bring a summand of their own: attention's output with the logits, the experts' with the projections
        # of the layer behind, in whole blocks, and the last layer's alone.
        for size, times in ((7168 + 384, 2), (7168 + 17 * 128, 1), (7168, 1)):
            assert sums["all-reduce", size * 8] == times
        # 3 a layer, of the embedding, and of sampling; the third layer's down projections ride in one of the second's.
        assert sum(sums.values()) == 3 * 3 - 1 + 3
        # What the router chooses is read once, by the core whose expert it is.
        chosen = 2 * 8 * 3 * 7168 * 32 + 8 * 32 * 2112 * 2
        assert fetches(graph)["chosen"] == pytest.approx(chosen, rel=0.01)


def test_expert_parallel_decode_writes_no_dequantized_weights() -> None:
    """Of an expert's weights a step has no float array but the operand of a product."""
    arrays = of_experts(graph_of("trn2-tp32-ep2", DECODE))
    assert {array["op"] for array in arrays if array["type"] in ("f32", "bf16")} == {"convert", "reshape", "dot"}
    dots = [array for array in arrays if array["op"] == "dot"]
    assert [dot["shape"] for dot in dots] == [[8, 112, 1, 128], [8, 1, 1, 7168]]  # 8 slots, blocks of 64
    assert all(dot["type"] == "f32" for dot in dots)
    # What a convert gives goes to one product alone.
    assert all(
        array["users"] == 1 for array in arrays if array["op"] in ("convert", "reshape") and array["type"] == "bf16"
    )


def test_caches_out_of_order_are_seen() -> None:
    """One's update given back for another, entries that no query met, an update left out."""
    graph = graph_of("trn2-tp64-ep1", DECODE)
    *_, root = entry_instructions(graph.hlo)
    name, other = (root.operands[graph.aliases[f"kv_mgr.past_key_values.{number}"]] for number in (0, 2))
    update = next(line for line in graph.hlo.splitlines() if f"%{name} = " in line)
    cache, _, new = re.findall(r"%[\w.]+", update)[1:4]
    for said, lines in {
        "is no update of it": update.replace(cache, f"%{other}"),
        "reads what was there before": f"%own = f32[] negate({new})\n" + update.replace(new, "%own"),
        "is lost": update.replace(name, "lost") + "\n" + update,
    }.items():
        assert said in stale(replace(graph, hlo=graph.hlo.replace(update, lines)))[0]


@pytest.mark.parametrize(("column", "preset"), [(2, "trn2-tp64-ep1"), (3, "trn2-tp32-ep2")])
def test_the_documents_count_a_layers_operations(column: int, preset: str) -> None:
    """What a third layer adds to two; the published port's column was counted once, of its own source."""
    text = (Path(__file__).parents[2] / "docs" / "measured.json").read_text(encoding="utf-8")
    told = {row[0]: row[column] for row in json.loads(text)["operations"]["rows"]}
    added, read = Counter[str](), 0
    for layers, sign in ((3, 1), (2, -1)):
        graph = graph_of(preset, DECODE, layers)
        added.update(
            {op: sign * n for op, n in Counter(instruction.op for instruction in entry_instructions(graph.hlo)).items()}
        )
        read += sign * counted(graph)["counts"].bytes_read()
    assert told["instructions"] == str(added.total())
    named = ("dot", "gather", "scatter", "sort")
    assert told["products; gathers; scatters; sorts"] == "; ".join(str(added[op]) for op in named)
    assert (added["all-reduce"], added["all-gather"]) == (2, 1)
    read -= (graph.bucket - 512) * 576 * 2  # the port's graph has 512 slots
    assert told["MB that a core reads"] == f"{read / 1e6:.1f}"


@pytest.mark.parametrize(("tp", "ep", "quantized"), [(32, 2, True), (64, 1, False)], ids=["TP32xEP2", "TP64"])
def test_the_folders_graphs(tp: int, ep: int, quantized: bool) -> None:
    prefill, decode = launch(of_folder, tp, ep, quantized, way="lowered")
    local, width = 384 // ep, 2 * 2048 // tp
    for graph in (prefill, decode):
        types: dict[str, Any] = {
            name: re.findall(rf"(\w+)\[([\d,]*)\]\S* parameter\({number}\)", graph.hlo)[0]
            for number, name in graph.parameters.items()
        }
        # Of each layer two sums, behind attention and feed-forward, and its down projections; embedding and logits.
        sums = Counter(re.findall(r" (all-\w+|reduce-scatter)\(", graph.hlo))
        assert sums == {"all-reduce": 4, "all-gather": 4}
        assert "f64[" not in graph.hlo
        # Trained values are parameters; none was folded, none but the router's bias and FP8's scales is float32.
        assert [constant.shape for constant in graph.constants.values() if constant.numel() > 128] == []
        experts, bias = "layers.1.mlp.experts", "layers.1.mlp.router.e_score_correction_bias"
        scales = {f"{experts}.gate_up_proj.scale", f"{experts}.down_proj.scale"} if quantized else set()
        wide = {name for name, (kind, _) in types.items() if kind == "f32" and not name.startswith("input.")}
        assert wide == {bias, *scales}
        weight = "f8e4m3fn" if quantized else "bf16"
        assert types[f"{experts}.gate_up_proj.weight"] == (weight, f"{local},7168,{width}")
    # Experts that a step of one token loads.
    assert re.findall(r"= \w+\[(\d+),7168,(\d+)\]\S* gather\(", decode.hlo)[0] == ("8", str(width))
    assert len(prefill.hlo) < 500_000
