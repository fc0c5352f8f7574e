"""Members, layouts, stored and held forms, batches, buckets and options drawn together: equal, or refused by name.

KIMI_K2_DRAWS=200 draws more, and prints what became of them.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_folder import WORKER, copied, options_of, plain

from kimi_k2.parity.reference import load_transformers_model
from kimi_k2.synthetic.checkpoint import write_synthetic_checkpoint
from kimi_k2.synthetic.config import tiny_config, with_format

DRAWS = int(os.environ.get("KIMI_K2_DRAWS", "12"))
E4M3_MAX = 240.0
Job = dict[str, Any]
# What no draw may be served with; the field that the refusal names.
NOT_FOLLOWED: list[tuple[str, Any]] = [
    ("fused_qkv", True), ("vocab_parallel", True), ("attention_dtype", "bfloat16"), ("kv_cache_quant", True),
    ("flash_decoding_enabled", True), ("is_medusa", True), ("capacity_factor", 1.0), ("padding_side", "left"),
    ("speculation_length", 4), ("is_block_kv_layout", True), ("pp_degree", 2), ("cp_degree", 2),
    ("moe_fused_nki_kernel_enabled", True), ("mlp_kernel_enabled", True), ("early_expert_affinity_modulation", True),
    ("token_generation_batches", [1]), ("windowed_context_encoding_size", 16), ("buckets", [16]),
    ("lora_config", {"max_loras": 1}), ("no_such_option", 1),
]  # fmt: skip


def drawn(seed: int) -> Job:
    """One combination; most differ in many places at once."""
    pick = random.Random(seed)
    heads, layout = pick.choice([4, 8, 12]), pick.choice(["TP1", "TP2", "EP2", "TP2xEP2", "TP4", "EP4"])
    member = {
        "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": heads,
        "n_routed_experts": pick.choice([8, 16, 40]), "num_experts_per_tok": pick.choice([1, 2, 4]),
        "n_shared_experts": pick.choice([1, 1, 2]), "first_k_dense_replace": pick.choice([0, 1, 1, 2]),
        "hidden_size": pick.choice([128, 192, 256]), "moe_intermediate_size": pick.choice([64, 128, 192]),
        "v_head_dim": pick.choice([16, 32, 40]), "norm_topk_prob": pick.random() < 0.8,
        "q_lora_rank": pick.choice([48, 96]), "routed_scaling_factor": pick.choice([1.0, 2.827]),
    }  # fmt: skip
    batch = pick.choice([1, 1, 4])
    options: Job = {}
    held = pick.choice(["", "", "blockwise_symmetric", "expert_wise_per_channel_symmetric"])
    if held:
        options |= {"quantized": True, "quantization_type": held}
    if pick.random() < 0.4:
        buckets = {"context_encoding_buckets": [16, 32, 48], "token_generation_buckets": [32, 48]}
        options |= {"enable_bucketing": True, **pick.choice([buckets, {}])}
    if pick.random() < 0.4:
        options |= {"is_continuous_batching": True, "ctx_batch_size": 1}
    if pick.random() < 0.3:
        options["sequence_parallel_enabled"] = True
    if pick.random() < 0.3:
        options |= {"on_device_sampling_config": {"do_sample": pick.random() < 0.5}, "output_logits": True}
    if pick.random() < 0.3:
        options["rpl_reduce_dtype"] = "float32"
    if pick.random() < 0.5:
        options["prefill_rows_at_once"] = pick.choice([16, 64, 200])
    if pick.random() < 0.3:
        options["blockwise_matmul_config"] = {"block_size": pick.choice([8, 24, 128])}
    if pick.random() < 0.15:
        name, value = pick.choice(NOT_FOLLOWED)
        options[name] = value
    form = pick.choice(["bf16", "fp8", "fp8-channel", "int4"])
    return {
        "seed": seed, "layout": layout, "form": form, "member": member, "batch": batch,
        "preset": pick.choice(["kimi-k2-instruct-0905", "kimi-k2-instruct-0905", "kimi-k2.5"]), "held": held,
        "neuron_config": options_of(layout, batch, **options),
    }  # fmt: skip


def held_as(directory: Path, held: str, side: int) -> None:
    """Round a plain checkpoint's routed experts as FP8 with a scale a channel or a block, by arithmetic of our own."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".mlp.experts." not in name:
            continue
        size = (1, tensor.shape[1]) if held.startswith("expert") else (side, side)
        blocks = tensor.reshape(tensor.shape[0] // size[0], size[0], tensor.shape[1] // size[1], size[1])
        scale = blocks.abs().amax(dim=(1, 3), keepdim=True) / E4M3_MAX
        rounded = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
        tensors[name] = rounded.reshape(tensor.shape).contiguous()
    save_file(tensors, file)


def side_of(job: Job) -> int:
    """Side of held blocks: the largest that divides the checkpoint's, the width and a rank's columns."""
    width = job["member"]["moe_intermediate_size"] // job["neuron_config"]["moe_tp_degree"]
    return math.gcd(128, job["member"]["hidden_size"], width)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_drawn(ranks: int, tmp_path: Path) -> None:
    jobs = [job for job in map(drawn, range(DRAWS)) if job["neuron_config"]["tp_degree"] == ranks]
    if not jobs:
        pytest.skip("none drawn")
    for job in jobs:
        checkpoint = tmp_path / str(job["seed"])
        config = tiny_config(job["preset"], **job["member"])
        write_synthetic_checkpoint(checkpoint, with_format(config, job["form"]), seed=job["seed"])
        job["checkpoint"] = str(checkpoint)
        case: Job = harness.sequences(job["batch"], 512, steps=3)
        if job["neuron_config"].get("is_continuous_batching") and job["batch"] > 1:
            case = {"arrival": [2, 0, 3, 1], **case}
        job["cases"] = [case]
    head = {"folder": str(copied(tmp_path)), "checkpoint": "", "neuron_config": {"tp_degree": ranks}, "carry on": True}
    answers = harness.launch({**head, "jobs": jobs}, tmp_path / "run", WORKER, timeout=1800)
    became: Counter[str] = Counter()
    wrong = []
    for job, found in zip(jobs, answers, strict=True):
        options = {name: value for name, value in job["neuron_config"].items() if name != "blockwise_matmul_config"}
        said = f"{job['seed']} {job['form']} {job['preset']} {json.dumps(job['member'])} {json.dumps(options)}"
        if isinstance(found, str):
            became[f"refused: {found}"] += 1
            continue
        if isinstance(found, dict):
            wrong.append(f"crash: {said}\n{found['crash']}")
            continue
        directory = plain(Path(job["checkpoint"]), tmp_path / f"plain{job['seed']}")
        if job["held"] and not (job["held"].startswith("block") and job["form"] == "fp8"):
            held_as(directory, job["held"], side_of(job))
        expected = harness.expected_logits(load_transformers_model(directory), job["cases"][0])
        worst = float((found[0] - expected).abs().max())
        became["equal"] += 1
        if not worst <= harness.TOLERANCE or not torch.equal(found[0].argmax(-1), expected.argmax(-1)):
            wrong.append(f"{worst:.1e}: {said}")
    print(f"\n{ranks} ranks: {dict(became)}")
    assert not wrong, "\n".join(wrong)
