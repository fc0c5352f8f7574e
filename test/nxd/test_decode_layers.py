"""What decode on whole layers refuses, and the first hour's commands of the docs; test_logits.py runs it."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import environment
import pytest
import torch
from cases import SLOTS, WHOLE, config_of, format_of, layers
from harness import command, neuron_config, refused_field

from kimi_k2.errors import ConfigError
from kimi_k2.sharding.early_router import HEADS, RESIDUAL

CAPTURE = {"tensor_capture_config": {"modules_to_capture": ["layers.1"]}, "on_device_sampling_config": {}}
SPLIT: dict[str, Any] = {"flash_decoding_enabled": True, "seq_len": 8 * SLOTS}


def options(**more: Any) -> dict[str, Any]:
    """Of two ranks."""
    case = layers("TP2")
    held = format_of(case, config_of(**case.source))
    return neuron_config(2, 1, 4, **{**held.neuron_options(), **case.options, **more})


def test_folded_weights_keep_their_dtype() -> None:
    """A cast of the model would round what experts are chosen by."""
    kept = environment.contrib("modeling_kimi_k2").NeuronKimiK2Model.kept
    assert all(f"layers.1.{name}".endswith(kept) for name in (RESIDUAL, HEADS))


@pytest.mark.parametrize(
    ("field", "more"),
    [
        ("decode", {"decode": "kernels"}),
        ("rpl_reduce_dtype", {"rpl_reduce_dtype": "bfloat16"}),
        ("seq_len", {"seq_len": 128 * 3}),
        ("token_generation_buckets", {"enable_bucketing": True, "token_generation_buckets": [128, 256]}),
        ("quantization_type", {"quantized": True, "quantization_type": "expert_wise_per_channel_symmetric"}),
        ("tensor_capture_config", {**CAPTURE, "batch_size": 1, "ctx_batch_size": 1}),
        ("batch_size", {"batch_size": 33}),
        ("batch_size", {**SPLIT, "batch_size": 32, "tp_degree": 8, "moe_tp_degree": 8}),
        ("seq_len", {**SPLIT, "seq_len": SLOTS}),
        ("logical_nc_config", {**SPLIT, "logical_nc_config": 1}),
    ],
)
def test_what_it_does_not_follow_is_refused(field: str, more: dict[str, Any]) -> None:
    config_module: Any = environment.contrib("config")
    given = options(**more)
    with pytest.raises(ConfigError) as caught:
        config_module.KimiK2NeuronConfig(on_cpu=True, torch_dtype=torch.float32, **given)
    assert caught.value.field == field
    assert "layers" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "sizes"),
    [
        ("moe_intermediate_size", {"moe_intermediate_size": 256}),
        ("num_experts_per_tok", {"num_experts_per_tok": 4}),
        ("kv_lora_rank", {"kv_lora_rank": 640}),
        ("v_head_dim", {"v_head_dim": 64}),
        ("q_lora_rank", {"q_lora_rank": 96}),
        ("first_k_dense_replace", {"first_k_dense_replace": 0}),
        ("n_routed_experts", {"n_routed_experts": 64}),
        ("hidden_size", {"hidden_size": 512}),
        ("norm_topk_prob", {"norm_topk_prob": False}),
        ("decode", {"n_shared_experts": 3}),
        ("num_attention_heads", {"num_attention_heads": 4}),
    ],
)
def test_sizes_that_it_does_not_take_are_refused(field: str, sizes: dict[str, Any]) -> None:
    more = SPLIT if field == "num_attention_heads" else {}
    assert refused_field(options(**more), config_of(**{**WHOLE, **sizes})) == field


def test_the_first_hours_commands_of_the_docs(tmp_path: Path) -> None:
    """Those of docs/trainium.md that need no machine and no real checkpoint, as they stand there."""
    text = (Path(__file__).parents[2] / "docs" / "trainium.md").read_text()
    section = text.split("## Decode on NKI kernels: the first hour\n")[1].split("\n## ")[0]
    lines = [
        line.strip() for block in re.findall(r"```sh\n(.*?)```", section, re.DOTALL) for line in block.splitlines()
    ]
    real = ("/models", "/presharded")
    here = [line for line in lines if line.startswith("kimi-k2 ") and not any(path in line for path in real)]
    assert len(here) == 5
    (edit,) = [line for line in lines if line.startswith("sed ")]
    subprocess.run(edit.replace("/tmp/", f"{tmp_path}/"), shell=True, check=True, cwd=Path(__file__).parents[2])
    for line in here:
        words = shlex.split(line.replace("/tmp/", f"{tmp_path}/"))[1:]
        print(f"\n$ {line}\n{command(*words, timeout=1500)[-1500:]}")
