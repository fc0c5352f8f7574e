"""The real graphs at Kimi-K2's shapes, two layers (one dense, one with experts), lowered on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import counts_of

from kimi_k2.config import KimiK2Config

WORKER = Path(__file__).with_name("lowering_worker.py")
DECODE, PREFILL = "token_generation_model", "context_encoding_model"


def lowered(*arguments: str) -> dict[str, Any]:
    """Counts of one graph."""
    return counts_of(WORKER, *arguments)


def same_weights(counts: dict[str, Any]) -> dict[str, Any]:
    """The plan of a graph, whose weights it holds and reads (the graph's inputs are not planned)."""
    planned: dict[str, Any] = counts["planned"]
    for what in ("weight_bytes_held", "weight_bytes_read", "routed_expert_bytes_read"):
        assert counts[what] == pytest.approx(planned[what], rel=1e-3), what
    return planned


def expert_bytes(moe_tp: int) -> int:
    """Weights of one expert on one rank, FP8, without scales."""
    config = KimiK2Config.from_preset("kimi-k2-instruct-0905")
    return 3 * config.hidden_size * config.moe_intermediate_size // moe_tp


def test_expert_parallel_decode_reads_8_experts_not_192() -> None:
    selective = lowered("trn2-tp32-ep2", "2", DECODE)
    everything = lowered("trn2-tp32-ep2", "2", DECODE, "all-experts")
    read, swept = selective["routed_expert_bytes_read"], everything["routed_expert_bytes_read"]
    print(
        f"\nbytes of routed experts a layer a rank: selective {read:,}, all experts {swept:,}, ratio {swept / read:.1f}"
    )
    assert 8 * expert_bytes(32) <= read <= 8 * expert_bytes(32) * 1.01  # the rest is scales
    assert 192 * expert_bytes(32) <= swept
    assert swept / read == pytest.approx(24, rel=1e-3)


def test_blocks_are_multiplied_as_they_are_stored() -> None:
    """Of an expert's weights a step has no float array but the operand of a product: nothing dequantized is written."""
    counts = lowered("trn2-tp32-ep2", "2", DECODE)
    arrays = counts["of_experts"]
    assert {one["op"] for one in arrays if one["type"] in ("f32", "bf16")} == {"convert", "reshape", "dot"}
    dots = [one for one in arrays if one["op"] == "dot"]
    assert [one["shape"] for one in dots] == [[8, 112, 1, 128], [8, 1, 1, 7168]]  # 8 slots, blocks of 64
    assert all(one["type"] == "f32" for one in dots)
    # What a convert gives goes to one product alone.
    assert all(one["users"] == 1 for one in arrays if one["op"] in ("convert", "reshape") and one["type"] == "bf16")


def test_tensor_parallel_decode_reads_8_experts() -> None:
    counts = lowered("trn2-tp64-ep1", "2", DECODE)
    assert 8 * expert_bytes(64) <= counts["routed_expert_bytes_read"] <= 8 * expert_bytes(64) * 1.05
    # Attention output and MLP output of both layers: one all-reduce each.
    assert counts["kinds"]["all-reduce 64"] == 4


@pytest.mark.parametrize(("preset", "stage"), [
    ("trn2-tp32-ep2", PREFILL), ("trn2-tp64-ep1", PREFILL), ("trn2-tp32-ep2", DECODE), ("trn2-tp64-ep1", DECODE),
    ("trn2-tp64-ep1-128k", DECODE), ("trn2-tp64-ep1-b8", DECODE), ("trn2-tp32-ep2-nki", PREFILL),
    ("trn2-tp64-ep1-nki-layers-128k", PREFILL),
])  # fmt: skip
def test_graphs_cost_what_the_planner_says(preset: str, stage: str) -> None:
    counts = lowered(preset, "2", stage)
    planned = same_weights(counts)
    # What chooses blocks and experts moves a little too; 1 % of the rows' 4 bytes a value.
    assert counts["bytes_moved"] == pytest.approx(planned["bytes_moved"], rel=0.01, abs=1e7)
    # Scratch is planned as no less than what is alive at once in the graph, and not much more.
    assert counts["live"] <= counts["planned_live"] <= 1.25 * counts["live"]
    assert counts["flops"] == planned["flops"]
    assert {frozenset(one.items()) for one in counts["collectives"]} == {
        frozenset(one.items()) for one in planned["collectives"]
    }


@pytest.mark.parametrize("preset", ["trn2-tp64-ep1-nki", "trn2-tp32-ep2-nki"])
def test_kernels_in_the_graph_cost_what_the_planner_says(preset: str) -> None:
    """HLO and kernels together; the kernels' products are in the plan alone."""
    counts = lowered(preset, "2", DECODE)
    planned, plain = counts["planned"], lowered(preset.removesuffix("-nki"), "2", DECODE)
    print(f"\n{preset}: {counts['weight_bytes_read']:,} bytes read, {counts['bytes_moved']:,} moved")
    same_weights(counts)
    # Of a token's 8 experts a rank of EP2 reads the 4 that it holds, and has no graph that reads the cache twice.
    assert 8 * expert_bytes(64) <= counts["routed_expert_bytes_read"] <= 8 * expert_bytes(64) * 1.01
    assert counts["bytes_moved"] < 300_000
    assert counts["live"] <= counts["planned_live"]
    # Of its weight a rank reads 384 x (7168 / 64 + 128) in float32; the logits ride in a collective that is there.
    assert counts["router_bytes_read"] == 384 * (240 * 4 + 2 * 4)  # the bias by both cores
    collectives = [collectives_of(found) for found in (counts, planned, plain)]
    assert collectives[0] == collectives[1]
    kinds = [sum(times for *_, times in found) for found in collectives]
    # 3 a layer, of the embedding, and of sampling; the second layer's down projections ride in one of the first's.
    assert (kinds[0], kinds[2]) == (8, 9)
    assert ("all-reduce", 64, (7168 + 384) * 4, 1) in collectives[0]


def with_options(preset: str, path: Path, experts: str | None = None, **options: Any) -> str:
    """A preset with other neuron options, written to `path`."""
    changed = {"experts": experts} if experts else {}
    path.write_text(yaml.safe_dump({"like": preset, "neuron_config": options, **changed}))
    return str(path)


def collectives_of(counts: dict[str, Any]) -> list[tuple[str, int, int, int]]:
    return sorted((one["kind"], one["ranks"], one["bytes"], one["times"]) for one in counts["collectives"])


@pytest.mark.parametrize("preset", ["trn2-tp64-ep1-nki", "trn2-tp32-ep2-nki"])
def test_early_down_projections_on_kernels_cost_what_the_planner_says(preset: str) -> None:
    """Three layers: the dense one and the second hand on the projections of the layer behind, the third has none."""
    counts = lowered(preset, "3", DECODE)
    planned, plain = same_weights(counts), lowered(preset, "2", DECODE)
    # 4 experts of 64 columns, or 8 of 32, of the one layer that has another behind it, in BF16.
    assert counts["routed_expert_bytes_read"] - 2 * plain["routed_expert_bytes_read"] == 8 * 32 * 2112 * 2
    assert counts["bytes_moved"] < 300_000
    assert counts["live"] <= counts["planned_live"]
    assert collectives_of(counts) == collectives_of(planned)
    assert sum(times for *_, times in collectives_of(counts)) == 3 * 3 - 2 + 3
    assert ("all-reduce", 64, (7168 + 2112) * 4, 2) in collectives_of(counts)
    assert ("all-gather", 64, 2112 * 2, 1) in collectives_of(counts)  # the first layer's
    # A layer's weights and cache wait for no collective, but for the experts that the router chooses.
    experts = next(one for one in counts["fetches"] if one["kernel"] == "selective_experts")
    shared = 3 * 7168 * 32 + 32 * 2112 * 2
    assert shared < experts["ahead"] < 1.2 * shared
    assert 8 * shared <= experts["chosen"] < 1.01 * 8 * shared
    assert experts["computed"] < 40_000


@pytest.mark.parametrize("preset", ["trn2-tp64-ep1-nki-layers", "trn2-tp32-ep2-nki-layers"])
def test_whole_layers_in_one_kernel_cost_what_the_planner_says(preset: str) -> None:
    """One dense layer and two with experts; of the kernel the DMA and the collectives inside are counted."""
    counts = lowered(preset, "3", DECODE)
    planned = same_weights(counts)
    assert counts["kernels"] == {"attention_decode": 1, "decode_layers": 1}
    assert counts["bytes_moved"] < 400_000
    assert counts["live"] <= counts["planned_live"]
    assert collectives_of(counts) == collectives_of(planned)
    # Both cores bring a summand of their own: attention's output with the logits, the experts' with the projections of
    # the layer behind, in whole blocks, and the last layer's alone.
    inside = [((7168 + 384) * 8, 2), ((7168 + 17 * 128) * 8, 1), (7168 * 8, 1)]
    for size, times in inside:
        assert ("all-reduce", 64, size, times) in collectives_of(counts)
    assert sum(times for *_, times in collectives_of(counts)) == 3 * 3 - 2 + 3
    # What the router chooses is read once, by the core whose expert it is.
    folded = 8 * 32 * 2112 * 2
    assert counts["fetches"][1]["chosen"] == pytest.approx(2 * 8 * 3 * 7168 * 32 + folded, rel=0.01)


def test_whole_layers_over_a_part_of_the_cache_cost_what_the_planner_says() -> None:
    """`mla_decode` reads the dense layer's part; in the layers' kernel an all-to-all brings a rank its head's parts."""
    counts = lowered("trn2-tp64-ep1-nki-layers-128k", "3", DECODE)
    planned = same_weights(counts)
    assert counts["kernels"] == {"mla_decode": 1, "decode_layers": 1}
    assert counts["bytes_moved"] < 500_000
    assert counts["live"] <= counts["planned_live"]
    assert collectives_of(counts) == collectives_of(planned)
    assert ("all-to-all", 16, 16 * 2 * 513 * 4, 2) in collectives_of(counts)
    # Queries of 16 heads are made in FP8, and each core reads its half of them.
    queries = 2 * 16 * (1536 * 192 + 512 * 128)
    layers = next(one for one in counts["fetches"] if one["kernel"] == "decode_layers")
    assert layers["ahead"] > queries


def test_prefill_from_attention_tiles_costs_what_the_planner_says(tmp_path: Path) -> None:
    """BF16 tiles are all that is held of q_b, kv_b and o_proj."""
    path = with_options("trn2-tp32-ep2-nki", tmp_path / "tiles.yaml", decode="layers")
    counts = lowered(path, "2", PREFILL)
    planned, plain = same_weights(counts), lowered("trn2-tp32-ep2-nki", "2", PREFILL)
    assert counts["weight_bytes_held"] == plain["weight_bytes_held"]
    assert counts["flops"] == planned["flops"] == plain["flops"]
    assert collectives_of(counts) == collectives_of(planned)
    assert counts["live"] <= counts["planned_live"]


@pytest.mark.parametrize("stage", [DECODE, PREFILL])
def test_early_sums_cost_what_the_planner_says(tmp_path: Path, stage: str) -> None:
    """Without kernels, so that GEMMs are in the graph too; prefill computes projections and logits as always."""
    path = with_options("trn2-tp64-ep1", tmp_path / "early.yaml", "bf16_tiles", decode="kernels")
    counts = lowered(path, "3", stage, "without-kernels")
    planned = same_weights(counts)
    assert counts["flops"] == pytest.approx(planned["flops"], rel=0.0 if stage == DECODE else 0.03)
    assert collectives_of(counts) == collectives_of(planned)
    gathers = sum(times for kind, _, size, times in collectives_of(counts) if kind == "all-gather" and size == 2112 * 2)
    assert stage == PREFILL or gathers == 1
    # Of two layers, the logits' weights in float32, or the router's own in BF16.
    assert counts["router_bytes_read"] == 2 * 384 * ((240 if stage == DECODE else 7168 / 2) * 4 + 4)
