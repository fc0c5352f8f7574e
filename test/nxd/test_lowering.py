"""The real graphs at Kimi-K2's shapes, two layers (one dense, one with experts), lowered on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
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
    ("trn2-tp64-ep1-128k", DECODE), ("trn2-tp64-ep1-b8", DECODE),
    ("trn2-tp32-ep2-nki-layers", PREFILL), ("trn2-tp64-ep1-nki-layers-128k", PREFILL),
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


def collectives_of(counts: dict[str, Any]) -> list[tuple[str, int, int, int]]:
    return sorted((one["kind"], one["ranks"], one["bytes"], one["times"]) for one in counts["collectives"])


@pytest.mark.parametrize("preset", ["trn2-tp64-ep1-nki-layers", "trn2-tp32-ep2-nki-layers"])
def test_whole_layers_in_one_kernel_cost_what_the_planner_says(preset: str) -> None:
    """One dense layer and two with experts; of the kernel the DMA and the collectives inside are counted."""
    counts = lowered(preset, "3", DECODE)
    planned = same_weights(counts)
    assert counts["kernels"] == {"decode_layers": 1}
    assert counts["bytes_moved"] < 400_000
    assert counts["live"] <= counts["planned_live"]
    assert collectives_of(counts) == collectives_of(planned)
    # Both cores bring a summand of their own: attention's output with the logits, the experts' with the projections of
    # the layer behind, in whole blocks, and the last layer's alone.
    inside = [((7168 + 384) * 8, 2), ((7168 + 17 * 128) * 8, 1), (7168 * 8, 1)]
    for size, times in inside:
        assert ("all-reduce", 64, size, times) in collectives_of(counts)
    # 3 a layer, of the embedding, and of sampling; the third layer's down projections ride in one of the second's.
    assert sum(times for *_, times in collectives_of(counts)) == 3 * 3 - 1 + 3
    # What the router chooses is read once, by the core whose expert it is.
    folded = 8 * 32 * 2112 * 2
    assert counts["fetches"][0]["chosen"] == pytest.approx(2 * 8 * 3 * 7168 * 32 + folded, rel=0.01)


def test_whole_layers_over_a_part_of_the_cache_cost_what_the_planner_says() -> None:
    """In the layers' kernel an all-to-all brings a rank its head's parts."""
    counts = lowered("trn2-tp64-ep1-nki-layers-128k", "3", DECODE)
    planned = same_weights(counts)
    assert counts["kernels"] == {"decode_layers": 1}
    assert counts["bytes_moved"] < 500_000
    assert counts["live"] <= counts["planned_live"]
    assert collectives_of(counts) == collectives_of(planned)
    assert ("all-to-all", 16, 16 * 2 * 513 * 4, 2) in collectives_of(counts)
    # Queries of 16 heads are made in FP8, and each core reads its half of them.
    queries = 2 * 16 * (1536 * 192 + 512 * 128)
    layers = next(one for one in counts["fetches"] if one["kernel"] == "decode_layers")
    assert layers["ahead"] > queries
