"""BF16 graphs with FP8 experts on four ranks, tensor and expert parallel: executed, and the dtypes that they hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import SLOW, distances, draw_cases, execute, expected_logits, neuron_config, plain_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_experts import requantized

from kimi_k2.config import KimiK2Config
from kimi_k2.parity.reference import load_transformers_model
from kimi_k2.sharding.experts.format import expert_formats
from kimi_k2.sharding.layout import Layout
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

PROMPTS = (24, 470)
STEPS = 16
CASES = draw_cases(PROMPTS, STEPS, seed=1)


def transformers_bf16(directory: Path, out: Path) -> Any:
    """transformers' BF16 model of a checkpoint, dequantized by the plain model: 4.57 cannot read FP8 on a CPU."""
    config = with_format(KimiK2Config.from_pretrained(directory), "bf16")
    write_synthetic_checkpoint(out, config)
    exact = plain_model(directory).state_dict()
    for path in out.glob("*.safetensors"):
        held = load_file(path)
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        save_file({name: plain_tensor(exact, name).to(old.dtype) for name, old in held.items()}, path, metadata)
    return load_transformers_model(out, torch.bfloat16)


def plain_tensor(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A checkpoint's tensor from the plain model's state dict, which stacks the experts."""
    if name in state:
        return state[name]
    match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
    assert match is not None, name
    moe, expert, projection = match.groups()
    if projection == "down":
        return state[f"{moe}.down_proj"][int(expert)].contiguous()
    return state[f"{moe}.gate_up_proj"][int(expert)].chunk(2)[projection == "up"].contiguous()


def expected_type(name: str) -> str:
    """The dtype contract after `load_module`: what is not the model's dtype."""
    if name.endswith((".scale", "e_score_correction_bias")):
        return "torch.float32"
    if ".mlp.experts." in name:
        return "torch.float8_e4m3fn"
    return "torch.bfloat16"


@pytest.mark.parametrize("name", ["blockwise", "per_channel"])
@pytest.mark.parametrize(("tp", "ep"), [(2, 2), pytest.param(4, 2, marks=SLOW)])
def test_tensor_and_expert_parallel(tmp_path: Path, tp: int, ep: int, name: str) -> None:
    """The yardstick is transformers' BF16 run of the dequantized checkpoint, which rounds at the same places."""
    directory, config = tmp_path / "source", tiny_config(num_attention_heads=tp * ep, num_key_value_heads=tp * ep)
    write_synthetic_checkpoint(directory, config, seed=0)
    experts = expert_formats()[name].for_layout(config, Layout(tp, ep))
    options = neuron_config(tp, ep, 1, seq_len=512, torch_dtype="bfloat16", **experts.neuron_options())
    options["blockwise_matmul_config"]["block_size"] = 64
    done = execute({"checkpoint": directory, "neuron_config": options, "cases": CASES}, tmp_path)

    assert {key: kind for key, kind in done["loaded"].items() if kind != expected_type(key)} == {}
    assert sum(kind == "torch.float8_e4m3fn" for kind in done["loaded"].values()) == 4
    for graph in done["graphs"]:
        held = {key: kind for key, kind in graph["types"].items() if key.endswith(("scale", "correction_bias"))}
        assert set(held.values()) == {"f32"}
        assert len(held) == 6

    exact = plain_model(directory)
    rounded = transformers_bf16(directory, tmp_path / "dequantized")
    converted = exact if name == "blockwise" else requantized(directory, experts)
    for case, logits in zip(CASES, done["logits"], strict=True):
        expected, original = expected_logits(converted, case), expected_logits(exact, case)
        ours = distances(logits, expected)
        theirs = distances(expected_logits(rounded, case), original)
        print(
            f"\n{name} TP{tp}xEP{ep}, {len(case['prompts'][0])} tokens and {STEPS} steps: relative L2, median: ours"
            f" {float(ours.median()):.4f}, transformers in BF16 {float(theirs.median()):.4f}"
        )
        assert float(ours.median()) <= float(theirs.median())
