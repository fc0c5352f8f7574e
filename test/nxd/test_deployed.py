"""The graphs that are compiled, in BF16, executed from their HLO: dtypes, and distance to the plain model in float32.

The yardstick is transformers' own model in BF16 at the same positions.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import distances, draw_cases, execute, expected_logits, neuron_config, plain_model

from kimi_k2.parity.reference import load_transformers_model

LENGTH = 4096
PROMPTS = (24, 1500, 4072)
STEPS = 16
CASES = draw_cases(PROMPTS, STEPS, seed=0)


@pytest.fixture(scope="module")
def bf16(long_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One rank, prefill and decode in BF16."""
    options = neuron_config(1, 1, 1, seq_len=LENGTH, torch_dtype="bfloat16")
    options["blockwise_matmul_config"]["block_size"] = 128
    job = {"checkpoint": long_checkpoint, "neuron_config": options, "cases": CASES}
    result: dict[str, Any] = execute(job, tmp_path_factory.mktemp("bf16"))
    return result


def test_float32_where_float32_is_due(bf16: dict[str, Any]) -> None:
    """No float parameter of a graph is BF16 but the weights; the rotation's frequencies are a float32 constant."""
    for graph in bf16["graphs"]:
        types = graph["types"]
        biases = [kind for name, kind in types.items() if name.endswith("e_score_correction_bias")]
        assert biases == ["f32", "f32"]
        assert not [name for name in types if "inv_freq" in name]
        made = [kind for name, kind in types.items() if name.startswith("constant.")]
        assert "bf16" not in made, graph["stage"]
        # The router's scores and its choice; NxD's masks of experts are float64.
        assert not re.search(r"= \(?f64\[\S* (logistic|sort|topk|custom-call)\(", graph["hlo"])
        assert len(re.findall(r"= f32\[\d+,16\]\S* logistic\(", graph["hlo"])) == 2
        assert "f32[8]{0} parameter(" in graph["hlo"]  # qk_rope_head_dim is 16
        # The router's logits of 16 experts, in both of the layers that have some.
        assert len(re.findall(r"= f32\[\d+,16\]\S* dot\(", graph["hlo"])) == 2


def test_positions_up_to_4095(bf16: dict[str, Any], long_checkpoint: Path) -> None:
    plain = plain_model(long_checkpoint)
    rounded = load_transformers_model(long_checkpoint, torch.bfloat16)
    for case, logits in zip(CASES, bf16["logits"], strict=True):
        expected = expected_logits(plain, case)
        ours = distances(logits, expected)
        theirs = distances(expected_logits(rounded, case), expected)
        start = len(case["prompts"][0])
        print(
            f"\npositions {start - 1}..{start + STEPS - 1}: relative L2, median (largest): ours"
            f" {float(ours.median()):.4f} ({float(ours.max()):.3f}), transformers in BF16"
            f" {float(theirs.median()):.4f} ({float(theirs.max()):.3f})"
        )
        assert float(ours.median()) <= float(theirs.median())
