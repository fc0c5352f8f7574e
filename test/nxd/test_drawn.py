"""Members, layouts, stored and held forms, batches, buckets and features drawn together: equal, or refused by name.

The folder of contrib/models alone in CPU mode, its graphs executed, and the package's class with kernels, drafts and
cached prefixes. KIMI_K2_DRAWS=200 draws more, and prints what became of them.
"""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import applications
import folder_cpu
import pytest
import schedule
import torch
from cases import BLOCKS, FIVE, FLASH, LINES, WHOLE, Case, config_of, copied, format_of, job, model_of, write
from harness import DRAWS, LAYOUTS, TOLERANCE, launch, ranks_of
from reference import reference
from schedule import Script

MEMBERS = (
    "kimi-k2-instruct", "kimi-k2-instruct-0905", "kimi-k2-thinking", "kimi-k2.5", "kimi-k2.6", "kimi-k2.7-code",
)  # fmt: skip
# What no draw of the folder may be served with; the field that the refusal names.
NOT_FOLLOWED: list[tuple[str, Any]] = [
    ("fused_qkv", True), ("vocab_parallel", True), ("attention_dtype", "bfloat16"), ("kv_cache_quant", True),
    ("flash_decoding_enabled", True), ("is_medusa", True), ("capacity_factor", 1.0), ("padding_side", "left"),
    ("speculation_length", 4), ("is_block_kv_layout", True), ("pp_degree", 2), ("cp_degree", 2),
    ("moe_fused_nki_kernel_enabled", True), ("mlp_kernel_enabled", True), ("early_expert_affinity_modulation", True),
    ("token_generation_batches", [1]), ("windowed_context_encoding_size", 16), ("buckets", [16]),
    ("lora_config", {"max_loras": 1}), ("no_such_option", 1),
]  # fmt: skip
SAMPLING = ("on_device_sampling_config", "output_logits", "disable_argmax_kernel")
Drawn = tuple[Case, Script]


def executed(seed: int) -> Drawn:
    """One combination; most differ in many places at once."""
    pick = random.Random(seed)
    heads, layout = pick.choice([4, 8, 12]), pick.choice([*FIVE, "EP4"])
    source: dict[str, Any] = {
        "num_hidden_layers": 2, "num_attention_heads": heads, "num_key_value_heads": heads,
        "n_routed_experts": pick.choice([8, 16, 40]), "num_experts_per_tok": pick.choice([1, 2, 4]),
        "n_shared_experts": pick.choice([1, 1, 2]), "first_k_dense_replace": pick.choice([0, 1, 1, 2]),
        "hidden_size": pick.choice([128, 192, 256]), "moe_intermediate_size": pick.choice([64, 128, 192]),
        "v_head_dim": pick.choice([16, 32, 40]), "norm_topk_prob": pick.random() < 0.8,
        "q_lora_rank": pick.choice([48, 96]), "routed_scaling_factor": pick.choice([1.0, 2.827]),
        "rms_norm_eps": pick.choice([1e-6, 1e-5]), "qk_rope_head_dim": pick.choice([16, 16, 32]),
        "form": pick.choice(["bf16", "fp8", "fp8-channel", "int4"]),
        "member": pick.choice(["kimi-k2-instruct-0905", "kimi-k2-instruct-0905", "kimi-k2.5"]),
    }  # fmt: skip
    batch = pick.choice([1, 1, 4])
    options: dict[str, Any] = {}
    if held := pick.choice(["", "", "blockwise_symmetric", "expert_wise_per_channel_symmetric"]):
        options |= {"quantized": True, "quantization_type": held}
    if pick.random() < 0.4:
        buckets = {"context_encoding_buckets": [16, 32, 48], "token_generation_buckets": [32, 48]}
        options |= {"enable_bucketing": True, **pick.choice([buckets, {}])}
    if pick.random() < 0.4:
        options |= {"is_continuous_batching": True, "ctx_batch_size": 1}
    if pick.random() < 0.3:
        options["sequence_parallel_enabled"] = True
    if pick.random() < 0.3:
        sampling = {"do_sample": pick.random() < 0.5, "top_k_kernel_enabled": False}
        options |= {"on_device_sampling_config": sampling, "output_logits": True, "disable_argmax_kernel": True}
    if pick.random() < 0.3:
        options["rpl_reduce_dtype"] = "float32"
    if pick.random() < 0.5:
        options["prefill_rows_at_once"] = pick.choice([16, 64, 200])
    if pick.random() < 0.3:
        options["blockwise_matmul_config"] = {"block_size": pick.choice([8, 24, 128])}
    if pick.random() < 0.15:
        options |= dict([pick.choice(NOT_FOLLOWED)])
    case = Case(layout, options, batch=batch, source=source, more={"folder": "kimi_k2.contrib_model"})
    arrival = [2, 0, 3, 1] if batch > 1 and "is_continuous_batching" in options else None
    return case, schedule.sequences(batch, 3, arrival, seed=seed)


def of_folder(seed: int) -> Drawn:
    """The same, but for logits beside tokens that are chosen on the device, which NxDI's CPU mode does not give."""
    case, script = executed(seed)
    options = {name: value for name, value in case.options.items() if name not in SAMPLING}
    return case._replace(options=options, more={"folder": "src"}), script


def of_class(seed: int) -> Drawn:
    """Decode forms, several tokens a step, prefix caches and split caches."""
    draw = random.Random(seed)
    layout = draw.choice(["TP1", "TP1", "TP1", "TP2", "EP2"])
    decode = draw.choice(("xla", "layers", "layers", "layers"))
    cached = draw.random() < 0.25
    batch = draw.choice((4, 4, 8) if cached else (1, 1, 2, 3, 4, 8, 32))
    tokens = 1 if batch > 8 else draw.choice((1, 1, 2, 3, 4))
    width = draw.choice((1, 1, 1, tokens)) if cached else tokens
    continuous, split = cached or draw.random() < 0.5, layout != "TP1" and draw.random() < 0.4
    ranks, each = ranks_of(layout), draw.choice((None, 60, 1)) if decode == "layers" else None
    heads = ranks if split else 4
    source = {
        "member": draw.choice(MEMBERS), "form": "", "vision": None, **WHOLE, "hidden_size": 128 * ranks,
        # Four lines choose fewer experts than there are, and 32 of 384.
        "n_routed_experts": 384 if batch == 32 else 128, "num_attention_heads": heads, "num_key_value_heads": heads,
    }  # fmt: skip
    length = 256 * (ranks if split else 1)  # a rank has 256 slots of a cache
    options: dict[str, Any] = {"seq_len": length, "decode": decode, "logical_nc_config": 1 if layout == "TP1" else 2}
    options |= FLASH if split else {}
    options |= {"decode_layers_per_kernel": each} if each else {}
    options |= {"speculation_length": width} if width > 1 else {}
    if continuous:
        options |= {**LINES, **dict.fromkeys(("tkg_batch_size", "max_batch_size"), batch)}
    if cached:
        options |= {**BLOCKS, **dict.fromkeys(("tkg_batch_size", "max_batch_size"), batch), "seq_len": length}
        options |= {"pa_num_blocks": length // 8 + 20, "token_generation_buckets": [length]}
    in_blocks = config_of(**source).format_of_experts().e4m3_block is not None
    experts = "tiles" if decode == "layers" else "blockwise" if in_blocks else "per_channel"
    case = Case(layout, options, batch=batch, source=source, experts=experts)
    if cached:
        return case, schedule.shared_prefixes(seed=seed)
    rows, every = schedule.drawn(batch, 48, seed), list(range(batch))
    at = [draw.randint(5, 20) for _ in rows]
    script = schedule.begun(rows, at, draw.sample(every, batch) if continuous else None)
    some, other = (draw.sample(every, n) if continuous else every for n in (draw.randint(1, batch), batch))
    for lines in [every, some] if batch > 8 else [every, some, other]:
        keep = draw.randint(1, width)
        script.decode(rows, at, lines, width - keep, keep)
    return case, script


def kernels(case: Case, script: Script) -> dict[str, int]:
    """How often the kernel runs: MoE layers are all but the first."""
    steps, moe = sum(step[0] == "decode" for step in script.steps), config_of(**case.source).num_hidden_layers - 1
    each = case.options.get("decode_layers_per_kernel", moe)
    return {"decode_layers": steps * -(-moe // each)} if case.options.get("decode") == "layers" else {}


def refused(case: Case) -> str | None:
    """The field that is refused, for a limit of NxDI's own."""
    prefixes = "is_prefix_caching" in case.options and "speculation_length" in case.options
    return "speculation_length" if prefixes and not case.more else None


def rounded(case: Case, directory: Path) -> Any:
    """transformers' model of a case, with experts as they are held."""
    held = case.options.get("quantization_type")
    if not case.more or not held or (held.startswith("block") and case.source["form"] == "fp8"):
        return model_of(case, directory)
    if held.startswith("expert"):
        return reference(directory, (1, 0))
    # The largest side that divides the checkpoint's blocks, the hidden size and a rank's columns.
    width = case.source["moe_intermediate_size"] // LAYOUTS[case.layout][0]
    side = math.gcd(128, case.source["hidden_size"], width)
    return reference(directory, (side, side))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("draw", "way", "count"), [
    (of_folder, "CPU mode", DRAWS or 12), (executed, "executed", DRAWS or 6), (of_class, "CPU mode", DRAWS or 5),
])  # fmt: skip
def test_drawn(tmp_path: Path, draw: Any, way: str, count: int, ranks: int) -> None:
    drawn: dict[str, Drawn] = {str(seed): draw(seed) for seed in range(count)}
    cases = {seed: one for seed, one in drawn.items() if ranks_of(one[0].layout) == ranks}
    if not cases:
        pytest.skip("none drawn")
    jobs = {}
    for seed, (case, script) in cases.items():
        # A format that a layout cannot have is refused where the options are made, which no draw is.
        source = write(tmp_path / seed, seed=int(seed), **case.source)
        assert not case.experts or format_of(case, config_of(**case.source))
        jobs[seed] = {**job(case, source, script), "carry_on": True}
    limits: dict[str, Any] = {"ranks": ranks, "way": way, "timeout": 300 + 100 * len(jobs)}
    task = (folder_cpu.answers, str(copied(tmp_path))) if draw is of_folder else (applications.answers,)
    answers, became, wrong = launch(*task, jobs, **limits), Counter[str](), list[str]()
    for seed, (case, script) in cases.items():
        found, said = answers[seed], f"{seed}: {json.dumps(case._asdict(), default=str)}"
        if "refused" in found:
            became[f"refused: {found['refused']}"] += 1
            if not case.more and (found["refused"] != refused(case) or "NxDI" not in found["message"]):
                wrong.append(f"{found['message']}: {said}")
            continue
        if "error" in found:
            wrong.append(f"{found['error']}\n{said}")
            continue
        expected = script.expected(rounded(case, jobs[seed]["checkpoint"]))
        worst = float((found["logits"][0] - expected).abs().max())
        became["equal"] += 1
        same = torch.equal(found["logits"][0].argmax(-1), expected.argmax(-1))
        if not worst <= TOLERANCE or not same or found["kernels"] != kernels(case, script) or refused(case):
            wrong.append(f"{worst:.1e}, {found['kernels']}: {said}")
    print(f"\n{draw.__name__}, {ranks} ranks: {dict(became)}")
    assert not wrong, "\n".join(wrong)
