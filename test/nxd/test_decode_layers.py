"""Decode whose MoE layers are one kernel with its collectives inside, in NxD's CPU mode: ranks are processes."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import environment
import pytest
import torch
from cases import LINES
from harness import (
    DECODE_STEPS,
    LAYOUTS,
    SLOW,
    check,
    expected_logits,
    launch,
    neuron_config,
    plain_model,
    refused_field,
    sequences,
)
from stored_experts import plain_over_stored

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.sharding.early_router import HEADS, RESIDUAL
from kimi_k2.sharding.experts.format import expert_formats
from kimi_k2.sharding.layout import Layout
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

SLOTS = 256  # the least that the kernel takes at LNC=2
SIZES: dict[str, Any] = {
    "n_routed_experts": 128, "num_experts_per_tok": 8, "kv_lora_rank": 128, "q_lora_rank": 128,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "qk_rope_head_dim": 32, "moe_intermediate_size": 64,
}  # fmt: skip
# A rank has at most 128 columns of the residual, and 32 or 64 of an expert.
CAPTURE = {"tensor_capture_config": {"modules_to_capture": ["layers.1"]}, "on_device_sampling_config": {}}
OF_LAYOUT: dict[str, dict[str, Any]] = {"TP1": {"hidden_size": 128}, "TP2xEP2": {"moe_intermediate_size": 128}}
OF_LAYOUT["TP4"] = {"moe_intermediate_size": 128}


PAIRS: dict[str, Any] = {"flash_decoding_enabled": True, "num_cores_per_group": 2, "seq_len": 2 * SLOTS}
SPLIT: dict[str, Any] = {"flash_decoding_enabled": True, "seq_len": 8 * SLOTS}


def config_of(layout: str, **more: Any) -> KimiK2Config:
    return tiny_config(**{**SIZES, **OF_LAYOUT.get(layout, {}), **more})


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Checkpoint directories by layout and format, each written when it is asked for."""
    root = tmp_path_factory.mktemp("layers")

    def of(layout: str, fmt: str) -> Path:
        directory: Path = root / f"{layout}-{fmt}"
        if not directory.exists():
            write_synthetic_checkpoint(directory, with_format(config_of(layout), fmt), seed=5)
        return directory

    return of


def options(layout: str, cores: int, fmt: str = "bf16", batch: int = 4, **more: Any) -> dict[str, Any]:
    tp, ep = LAYOUTS[layout]
    config = with_format(config_of(layout), fmt)
    held = held_experts(config, tp, ep).neuron_options()
    given = {"seq_len": SLOTS, "decode": "layers", "logical_nc_config": cores, **held, **more}
    return neuron_config(tp, ep, batch, **given)


def held_experts(config: KimiK2Config, tp: int, ep: int) -> Any:
    """Tiles: in FP8 of checkpoints in FP8 and INT4."""
    name = "bf16_tiles" if config.quantization is None else "tiles"
    return expert_formats()[name].for_layout(config, Layout(tp, ep, experts=name))


def plain_of(checkpoint: Path, given: dict[str, Any]) -> Any:
    """The plain model; of INT4, whose experts are requantized, over what is stored."""
    config = KimiK2Config.from_pretrained(checkpoint)
    if config.quantization is None or config.quantization.e4m3_block is not None:
        return plain_model(checkpoint)
    neuron = environment.contrib("config").KimiK2NeuronConfig(on_cpu=True, torch_dtype=torch.float32, **given)
    return plain_over_stored(checkpoint, neuron, held_experts(config, given["moe_tp_degree"], given["moe_ep_degree"]))


@pytest.mark.parametrize(
    ("layout", "cores", "fmt", "batch", "more"),
    [
        ("TP1", 1, "int4", 1, {}),
        pytest.param("TP2", 2, "int4", 1, {}, marks=SLOW),
        pytest.param("EP2", 2, "int4", 4, {}, marks=SLOW),
        ("TP2", 2, "bf16", 1, {}),
        ("EP2", 2, "bf16", 4, {}),
        ("TP2xEP2", 2, "bf16", 1, {}),
        pytest.param("TP2", 2, "fp8", 4, {}, marks=SLOW),
        ("EP2", 2, "fp8", 1, {}),
        ("EP2", 2, "bf16", 4, LINES),
        pytest.param("TP2", 2, "bf16", 4, {"sequence_parallel_enabled": True}, marks=SLOW),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else str(value),
)
def test_prefill_and_16_steps(
    stored: Any, tmp_path: Path, layout: str, cores: int, fmt: str, batch: int, more: dict[str, Any]
) -> None:
    checkpoint, case = stored(layout, fmt), sequences(batch, 512)
    given: dict[str, Any] = {**case, **({"arrival": [2, 0, 3, 1]} if more is LINES else {})}
    neuron = options(layout, cores, fmt, batch, **more)
    job = {"checkpoint": checkpoint, "neuron_config": neuron, "cases": [given]}
    result = launch(job, tmp_path, timeout=1500)
    (logits,), plain = result["logits"], expected_logits(plain_of(checkpoint, neuron), case)
    check(f"{layout} {fmt}, {result['kernels']}", logits, plain)
    assert result["kernels"] == {"decode_layers": DECODE_STEPS}  # both MoE layers in one call


@pytest.mark.parametrize("layout", ["TP1", pytest.param("EP2", marks=SLOW)])
def test_chunks_of_any_size_are_the_same_step(tmp_path: Path, layout: str) -> None:
    """Calls of 1, 4, 15 and 60 MoE layers, of a model of 5: the same bits."""
    checkpoint, case = tmp_path / "source", sequences(1, 512, steps=2)
    write_synthetic_checkpoint(checkpoint, with_format(config_of(layout, num_hidden_layers=6), "bf16"), seed=5)
    found = []
    for each, calls in ((1, 5), (4, 2), (15, 1), (60, 1)):
        given = options(layout, 2 if layout == "EP2" else 1, batch=1, decode_layers_per_kernel=each)
        job = {"checkpoint": checkpoint, "neuron_config": given, "cases": [case]}
        result = launch(job, tmp_path / str(each), timeout=600)
        assert result["kernels"] == {"decode_layers": 2 * calls}
        found.append(result["logits"][0])
    assert all(torch.equal(one, found[0]) for one in found)
    check("chunks", found[0], expected_logits(plain_model(checkpoint), case))


@pytest.mark.parametrize(("cores", "fmt", "batch"), [(2, "bf16", 1), (4, "fp8", 4), (2, "bf16", 4)])
def test_flash_decoding(stored: Any, tmp_path: Path, cores: int, fmt: str, batch: int) -> None:
    """Groups of ranks share a cache; each rank makes the queries of its whole group. Attention in FP8 beside FP8."""
    checkpoint, case = stored("TP4", fmt), sequences(batch, 512)
    split = {"flash_decoding_enabled": True, "num_cores_per_group": cores, "seq_len": SLOTS * cores}
    given = options("TP4", 2, fmt, batch, **split)
    job = {"checkpoint": checkpoint, "neuron_config": given, "cases": [case]}
    result = launch(job, tmp_path, timeout=1500)
    (logits,), plain = result["logits"], expected_logits(plain_model(checkpoint), case)
    check(f"groups of {cores}, {result['kernels']}", logits, plain)
    assert result["kernels"] == {"decode_layers": DECODE_STEPS}


@pytest.mark.parametrize(("layout", "fmt"), [("TP2", "bf16"), ("EP2", "fp8")])
def test_operations_on_the_kernels_weights(stored: Any, tmp_path: Path, layout: str, fmt: str) -> None:
    """Where the kernel does not run, as with the vendor's `nki` on a CPU, a step computes from the same tiles."""
    checkpoint, case = stored(layout, fmt), sequences(4, 512)
    given = {"checkpoint": checkpoint, "neuron_config": options(layout, 2, fmt), "cases": [case]}
    result = launch({**given, "without_kernel": True}, tmp_path, timeout=1500)
    check(f"{layout} {fmt}", result["logits"][0], expected_logits(plain_model(checkpoint), case))
    assert result["kernels"] == {}


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
    given = options("TP2", 2, **more)
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
    assert refused_field(options("TP2", 2, **more), config_of("TP2", **sizes)) == field


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
    run = [sys.executable, "-c", "from kimi_k2.cli import main; main()"]
    env = {name: value for name, value in os.environ.items() if name != "NXD_CPU_MODE"}
    for line in here:
        words = shlex.split(line.replace("/tmp/", f"{tmp_path}/"))[1:]
        done = subprocess.run([*run, *words], capture_output=True, text=True, timeout=1500, env=env)
        print(f"\n$ {line}\n{done.stdout[-1500:]}")
        # Without a Neuron SDK the doctor's status says what is missing.
        assert done.returncode == 0 or words == ["doctor"], done.stderr[-3000:]
