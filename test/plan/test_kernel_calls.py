"""Custom calls of NKI kernels in HLO text are counted by what the kernels' own DMA moves."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from hlo import count

HIDDEN, BLOCKS, EXPERTS, TOP_K, RANK, ROPE = 7168, 56, 384, 8, 512, 64


def module(name: str, arguments: Mapping[str, object], operands: dict[str, str], result: str) -> str:
    """A graph of one call whose operands are parameters, but for those named `made...`, which are sums of one."""
    lines = [f"  %{n} = {kind} parameter({i})" for i, (n, kind) in enumerate(operands.items())]
    used = []
    for operand, kind in operands.items():
        used.append(f"%{operand}")
        if operand.startswith("made"):
            lines.append(f"  %sum.{operand} = {kind} add(%{operand}, %{operand})")
            used[-1] = f"%sum.{operand}"
    config = json.dumps(json.dumps({"cores": 2, **arguments}))
    call = f'custom-call({", ".join(used)}), custom_call_target="kimi_k2.nki.{name}", backend_config={config}'
    return "\n".join(["HloModule m", "ENTRY %m () -> f32[] {", *lines, f"  ROOT %call = {result} {call}", "}"])


def names(operands: dict[str, str]) -> dict[int, str]:
    return dict(enumerate(operands))


@pytest.mark.parametrize(("width", "local"), [(32, EXPERTS), (64, EXPERTS // 2)])
def test_experts_of_other_ranks_are_not_read(width: int, local: int) -> None:
    operands = {
        "made_hidden": f"bf16[1,{HIDDEN}]",
        "gate_up": f"f8e4m3fn[{local},128,{BLOCKS},{2 * width}]",
        "gate_up_scale": f"f32[{local},2,{BLOCKS}]",
        "down": f"f8e4m3fn[{local},{width},{HIDDEN}]",
        "down_scale": f"f32[{local},{BLOCKS}]",
        "made_index": f"s32[1,{TOP_K}]",
        "made_weights": f"f32[1,{TOP_K}]",
    }
    arguments = {"first_expert": 0, "num_experts": EXPERTS}
    text = module("selective_experts", arguments, operands, f"f32[1,{BLOCKS},128]")
    counts = count(text, names(operands))
    held = TOP_K * local // EXPERTS
    assert held == (8 if width == 32 else 4)
    assert counts.read["gate_up"] == held * HIDDEN * 2 * width
    assert counts.read["down"] == held * HIDDEN * width
    assert counts.read["gate_up_scale"] == 2 * counts.read["down_scale"] == held * 2 * BLOCKS * 4
    # Written once; hidden states, numbers and weights of the experts are read by both cores.
    assert HIDDEN * 4 < counts.moved["kernels"] <= HIDDEN * 4 + 2 * (HIDDEN * 2 + TOP_K * 8)


@pytest.mark.parametrize("slots", [1024, 4096])
def test_attention_reads_a_buckets_slots_once(slots: int) -> None:
    """Of pages, whose rows are chosen by number: half an entry of each slot from either."""
    half = (RANK + ROPE) // 2
    operands = {
        "made_query": f"bf16[1,1,{RANK + ROPE}]",
        "former": f"bf16[4096,{half}]",
        "latter": f"bf16[4096,{half}]",
        "made_rows": f"s32[1,{slots}]",
        "made_latent": f"bf16[1,{RANK}]",
        "made_key": f"bf16[1,{ROPE}]",
        "made_length": "s32[1,1]",
    }
    text = module("mla_decode_pages", {"softmax_scale": 0.1447}, operands, f"f32[1,1,{RANK}]")
    counts = count(text, names(operands))
    assert counts.read["former"] == counts.read["latter"] == slots * half * 2
    assert counts.moved["kernels"] < 20_000 + slots * 4


def test_the_router_reads_its_weight_once() -> None:
    operands = {
        "made_hidden": f"bf16[1,{HIDDEN}]",
        "weight": f"bf16[{HIDDEN},{EXPERTS}]",
        "bias": f"f32[1,{EXPERTS}]",
    }
    arguments = {"routed_scaling_factor": 2.827, "norm_topk_prob": True, "top_k": TOP_K}
    result = f"(s32[1,{TOP_K}], f32[1,{TOP_K}], f32[1,{EXPERTS}])"
    counts = count(module("noaux_tc_router", arguments, operands, result), names(operands))
    assert counts.read["weight"] == HIDDEN * EXPERTS * 2
    assert counts.read["bias"] == 2 * EXPERTS * 4  # by both cores


def test_other_calls_read_all_and_unknown_kernels_are_refused() -> None:
    text = module("write_pages", {}, {"weight": "bf16[128,64]"}, "f32[1]")
    counts = count(text.replace("kimi_k2.nki.write_pages", "Sharding"))
    assert counts.read == {"p0": 128 * 64 * 2}
    assert counts.moved == {}
    with pytest.raises(ValueError, match="custom_call_target"):
        count(text.replace("write_pages", "nothing"))
