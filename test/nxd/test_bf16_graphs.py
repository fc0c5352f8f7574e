"""The graphs that are compiled, in BF16, executed from their HLO: dtypes, and distance to float32.

The yardstick is transformers' own model in BF16 at the same positions, which rounds at the same places.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import schedule
import torch
from applications import Answer, answers
from cases import ODD, Case, Stored, job, model_of
from harness import SLOW, distances, launch, no_farther, ranks_of
from reference import reference

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
# One layer at Kimi-K2's widths with few experts, on the flagship's 64 ranks; 4 GB of memory.
REAL: dict[str, Any] = {
    "num_hidden_layers": 1, "first_k_dense_replace": 0, "hidden_size": 7168, "num_attention_heads": 64,
    "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_intermediate_size": 2048, "n_routed_experts": 6,
    "num_experts_per_tok": 2, "form": "fp8",
}  # fmt: skip


def row(layout: str, lengths: tuple[int, ...], length: int = 512, **more: Any) -> tuple[Case, tuple[int, ...]]:
    """A case of one sequence, and the lengths of the prompts, each run by itself: of few steps the median is chance."""
    options = {"seq_len": length, "torch_dtype": "bfloat16", **more.pop("options", {})}
    return Case(layout, options, batch=1, **more), lengths


FOLDER: dict[str, Any] = {"lengths": (24, 17, 5), "length": 64, "more": {"folder": "kimi_k2.contrib_model"}}
ROWS: dict[str, tuple[Case, tuple[int, ...]]] = {
    "positions up to 4095": row("TP1", (24, 1500, 4060), 4096),
    "blockwise TP2xEP2": row("TP2xEP2", (24, 470, 100), source={"form": "fp8"}, experts="blockwise"),
    "per_channel TP2xEP2": row("TP2xEP2", (24, 470, 100), source={"form": "fp8"}, experts="per_channel"),
    "blockwise TP4xEP2": row("TP4xEP2", (24, 470, 100), source={"form": "fp8", **HEADS}, experts="blockwise"),
    "folder TP1": row("TP1", source=ODD, **FOLDER),
    "folder blocks TP2xEP2": row("TP2xEP2", source={"form": "fp8", **ODD}, options={"quantized": True}, **FOLDER),
    "real widths TP32xEP2": row("TP32xEP2", (20, 7), 64, source=REAL, experts="blockwise"),
}
SLOW_ROWS = {"blockwise TP4xEP2", "real widths TP32xEP2"}


def expected_type(name: str) -> str:
    """The dtype contract after `load_module`: what is not the model's dtype."""
    if name.endswith((".scale", "e_score_correction_bias")):
        return "torch.float32"
    return "torch.float8_e4m3fn" if re.search(r"\.mlp\.experts\.", name) else "torch.bfloat16"


def check_dtypes(answer: Answer, quantized: bool) -> None:
    """Float32 where it is due, in loaded modules and in the graphs."""
    assert {key: kind for key, kind in answer["loaded"].items() if kind != expected_type(key)} == {} or not quantized
    eights = sum(kind == "torch.float8_e4m3fn" for kind in answer["loaded"].values())
    assert eights == (4 if quantized else 0)
    for graph in answer["graphs"]:
        types = graph["types"]
        wide = {key: kind for key, kind in types.items() if key.endswith((".scale", "e_score_correction_bias"))}
        assert set(wide.values()) == {"f32"}
        assert len(wide) == (6 if quantized else 2)
        assert not [name for name in types if "inv_freq" in name]
        assert "bf16" not in [kind for name, kind in types.items() if name.startswith("constant.")], graph["stage"]
        # The router's scores and its choice; NxD's masks of experts are float64.
        assert not re.search(r"= \(?f64\[\S* (logistic|sort|topk|custom-call)\(", graph["hlo"])
        assert len(re.findall(r"= f32\[\d+,16\]\S* logistic\(", graph["hlo"])) == 2
        assert "f32[8]{0} parameter(" in graph["hlo"]  # the rotation's frequencies: qk_rope_head_dim is 16
        # The router's logits of 16 experts, in both of the layers that have some.
        assert len(re.findall(r"= f32\[\d+,16\]\S* dot\(", graph["hlo"])) == 2


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW if name in SLOW_ROWS else ()) for name in ROWS])
def test_no_farther_from_float32_than_transformers(stored: Stored, name: str) -> None:
    """In the median: where a choice of experts is nearly a tie, rounding makes another, which is off by a third."""
    case, lengths = ROWS[name]
    source = stored(**case.source)
    made = job(case, source)
    if "folder" not in case.more:
        made["neuron_config"]["blockwise_matmul_config"]["block_size"] = 128 if "positions" in name else 64
    scripts = [schedule.sequences(1, 32, lengths=[length], seed=seed) for seed, length in enumerate(lengths)]
    made["scripts"] = scripts
    made["dtypes"] = not name.startswith(("folder", "real"))
    answer = launch(answers, {name: made}, ranks=ranks_of(case.layout), way="executed", timeout=900)[name]
    if made["dtypes"]:
        check_dtypes(answer, bool(case.experts))
    held, exact = model_of(case, source), reference(source)
    rounded = reference(source, dtype=torch.bfloat16)
    ours = torch.cat([
        distances(logits, script.expected(held)) for script, logits in zip(scripts, answer["logits"], strict=True)
    ])  # fmt: skip
    theirs = torch.cat([distances(script.expected(rounded), script.expected(exact)) for script in scripts])
    no_farther(name, ours, theirs)
