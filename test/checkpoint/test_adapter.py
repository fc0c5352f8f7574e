"""Drawn adapter_config.json files beside PEFT's merge of the same directory: the same weights, or refused by name."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from kimi_k2.checkpoint.adapter import adapter_scale
from kimi_k2.config import ADAPTER, KimiK2Config
from kimi_k2.errors import ConfigError

peft = pytest.importorskip("peft")
FILES, ROWS, COLUMNS = 100, 24, 16
NAMES = ("q_b_proj", "o_proj")
# What PEFT writes, and values that change nothing.
FIELDS: dict[str, list[Any]] = {
    "lora_alpha": [1, 8, 16, 7.5],
    "target_modules": [list(NAMES), ["o_proj"], "all-linear", r".*_proj"],
    "use_rslora": [True, False],
    "init_lora_weights": [True, False, "gaussian", "orthogonal"],
    "peft_type": ["LORA"],
    "task_type": ["CAUSAL_LM", None],
    "inference_mode": [True, False],
    "lora_dropout": [0.0, 0.1],
    "bias": ["none"],
    "base_model_name_or_path": ["m", None],
    "megatron_core": ["megatron.core"],
    "qalora_group_size": [16],
    **{name: [False] for name in ("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora")},
    **{name: [{}] for name in ("rank_pattern", "alpha_pattern", "loftq_config")},
    **{name: [None] for name in ("modules_to_save", "layers_to_transform", "layer_replication", "exclude_modules")},
}
# What PEFT does something else with, or fails at.
REFUSED: dict[str, list[Any]] = {
    "r": [0, -1, "8", 2.5, True, None],
    "lora_alpha": [0, -4, "8", None, float("inf")],
    "target_modules": [3, [1], None],
    "alpha_pattern": [{"o_proj": 32}],
    "rank_pattern": [{"o_proj": 2}],
    "bias": ["all", "lora_only"],
    "peft_type": ["IA3", "LOHA"],
    "init_lora_weights": ["pissa", "pissa_niter_4", "olora", "loftq", "corda"],
    **{name: [True, 1] for name in ("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora")},
    "modules_to_save": [["lm_head"]],
    "layer_replication": [[[0, 2], [1, 3]]],
    "layers_to_transform": [[0], 3],
    "exclude_modules": [["o_proj"]],
    "target_parameters": [["experts.gate_up_proj"]],
    "trainable_token_indices": [[5]],
    "lora_alpah": [8],
    "foo": [None, 1],
}


class Layer(nn.Module):
    prepare_inputs_for_generation = None  # PEFT asks causal models for it

    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            self.add_module(name, nn.Linear(COLUMNS, ROWS, bias=False))


def outcome(directory: Path, fields: dict[str, Any], seed: int) -> str:
    directory.mkdir(exist_ok=True)
    (directory / ADAPTER).write_text(json.dumps(fields))
    (directory / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="transformers would add to the weights beside it"):
        KimiK2Config.from_pretrained(directory)
    try:
        rank, scale = adapter_scale(directory)
    except ConfigError as error:
        assert error.file == str(directory / ADAPTER)
        assert error.field in {*fields, "r", "lora_alpha", "target_modules"}
        return "refused"
    torch.manual_seed(seed)
    chosen = [name for name in NAMES if fields["target_modules"] != ["o_proj"] or name == "o_proj"]
    pairs = {name: (torch.randn(rank, COLUMNS), torch.randn(ROWS, rank)) for name in chosen}
    named = {
        f"{name}.lora_{side}.weight": matrix
        for name, pair in pairs.items()
        for side, matrix in zip("AB", pair, strict=True)
    }
    save_file(
        {f"base_model.model.{name}": matrix for name, matrix in named.items()}, directory / "adapter_model.safetensors"
    )
    plain = Layer()
    expected = {name: getattr(plain, name).weight.detach().clone() for name in NAMES}
    for name, (a, b) in pairs.items():
        expected[name] += scale * b @ a
    merged = peft.PeftModel.from_pretrained(plain, str(directory)).merge_and_unload()
    for name in NAMES:
        torch.testing.assert_close(getattr(merged, name).weight.detach(), expected[name])
    return "same"


def drawn(draw: random.Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"r": draw.choice([2, 4, 8]), "lora_alpha": 16, "target_modules": list(NAMES)}
    fields |= {"peft_type": "LORA"} | {
        name: draw.choice(FIELDS[name]) for name in draw.sample(list(FIELDS), draw.randint(1, 9))
    }
    if draw.random() < 0.4:
        name = draw.choice(list(REFUSED))
        fields[name] = draw.choice(REFUSED[name])
    if draw.random() < 0.05:
        del fields[draw.choice(["r", "lora_alpha", "target_modules"])]
    return fields


@pytest.mark.filterwarnings("ignore")
def test_drawn_files_beside_peft(tmp_path: Path) -> None:
    draw = random.Random(45)
    found = Counter(outcome(tmp_path / str(number), drawn(draw), number) for number in range(FILES))
    print(f"\n{FILES} files: {dict(found)}")
    assert min(found["same"], found["refused"]) > FILES // 4


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_obeyed_is_refused_by_name(tmp_path: Path, name: str) -> None:
    for value in REFUSED[name]:
        fields = {"r": 4, "lora_alpha": 8, "target_modules": ["o_proj"], "peft_type": "LORA", name: value}
        assert outcome(tmp_path / "one", fields, 0) == "refused"
        with pytest.raises(ConfigError, match=rf"adapter_config\.json: field '{name}"):
            adapter_scale(tmp_path / "one")


@pytest.mark.parametrize("text", ["", "[]", '{"r": 4, "r": 8}', "{"])
def test_files_that_are_none(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"adapter_config\.json: no such file"):
        adapter_scale(tmp_path)
    (tmp_path / ADAPTER).write_text(text)
    with pytest.raises(ConfigError, match=r"adapter_config\.json: \S"):
        adapter_scale(tmp_path)
