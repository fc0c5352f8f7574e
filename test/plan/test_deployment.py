"""The presets of configs/ and the schema that they are read with."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from kimi_k2.config import KimiK2Config, published
from kimi_k2.errors import ConfigError
from kimi_k2.neuron.compile import build_application, compile_digest, environment, runtime_environment
from kimi_k2.plan.cost import decode_counts
from kimi_k2.plan.deployment import (
    CONFIGS,
    CONTEXT_ENCODING,
    Deployment,
    NeuronOptions,
    load_target,
    make_target,
    preset_names,
)
from kimi_k2.plan.memory import advice, memory_plan
from kimi_k2.plan.presets import LEADING, cells, preset_row, preset_rows, print_presets
from kimi_k2.plan.report import make_report, print_answer

# FP8 and INT4 with a tower; the others have one of their sizes and formats.
MEMBERS = published() if os.environ.get("KIMI_K2_SLOW") else ["kimi-k2-instruct-0905", "kimi-k2.5"]
GPU = """
instance: h200
experts: stored
tp_degree: 8
moe_tp_degree: 4
moe_ep_degree: 2
batch_size: 1
seq_len: 1024
max_context_length: 512
"""


def read(text: str, directory: Path) -> Deployment:
    path = directory / "mine.yaml"
    path.write_text(text)
    return Deployment.load(path)


@pytest.mark.parametrize("member", MEMBERS)
def test_trainium_presets_fit_or_say_why_not(member: str) -> None:
    """Of every member, with bytes by hand of what takes most: a byte a weight of the experts, and the latent cache."""
    config = KimiK2Config.from_preset(member)
    rows = {row["target"]["name"]: row for row in preset_rows(config)}
    assert next(iter(rows)) == LEADING and set(rows) == set(preset_names())
    trainium = {name: row for name, row in rows.items() if name.startswith("trn2")}
    assert all(row["rank_memory"]["fits"] for row in trainium.values())
    assert {row["target"]["context"] for row in trainium.values()} >= {1024, 4096, 32768, 131072}
    assert {row["target"]["batch"] for row in trainium.values()} >= {1, 8, 32}
    for name, row in rows.items():
        memory, why = row["rank_memory"], row["why_not"]
        assert memory["fits"] == (why == "") and "\n" not in why and memory["resident"] > 0, name
        if memory["fits"]:
            assert memory["needed"] <= memory["usable"]
            assert 0 < row["tpot"]["bound"] < row["ttft"]["bound"]
    for name, row in trainium.items():
        preset = Deployment.load(name)
        slots = preset.seq_len // preset.cache_ranks
        if preset.neuron_config.is_continuous_batching or preset.cache_ranks > 1:
            slots += 128
        cache = 61 * 576 * 2 * preset.batch_size * slots
        assert preset.torch_native or row["rank_memory"]["parts"]["KV cache"] == cache
        # Folded matrices of decode's kernels: 384 experts' q_a and kv_a in BF16.
        folded = 59 * 384 * 2048 * 2112 * 2 // 64 if preset.experts == "tiles" else 0
        known = 60 * 384 * 3 * 7168 * 2048 // 64 + cache + folded
        assert 0 < row["rank_memory"]["resident"] - known < 2.2 * 2**30, name
        reads = 60 * 8 * 3 * 7168 * 2048 // 64 + 61 * 576 * 2 * preset.batch_size * preset.seq_len // preset.cache_ranks
        assert row["decode"]["bytes_read"] + row["decode"]["bytes_moved"] > reads


def test_a_model_that_does_not_divide_is_a_row_that_says_so() -> None:
    config = KimiK2Config.from_preset("kimi-k2-instruct-0905", num_attention_heads=32, num_key_value_heads=32)
    row = preset_row(config, Deployment.load(LEADING))
    assert "does not divide among 64 ranks" in row["why_not"] and cells(row)[6:] == [""] * 8


def test_what_does_not_fit_has_a_line_below_the_table() -> None:
    larger = KimiK2Config.from_preset("kimi-k2-instruct-0905", num_hidden_layers=90)
    console = Console(record=True, width=165, file=io.StringIO())
    print_presets(rows := preset_rows(larger), console)
    text = console.export_text()
    assert not rows[0]["rank_memory"]["fits"]
    for row in rows:
        assert (f"{row['target']['name']}: does not fit" in text) == (not row["rank_memory"]["fits"])


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("instance: h200", "instance: b200", r"instance.*'trn2.48xlarge', 'trn3', 'h200' or 'h100'"),
        ("tp_degree: 8", "tp_degree: 16", "tp_degree.*expected moe_tp_degree x moe_ep_degree"),
        ("moe_tp_degree: 4", "moe_tp_degree: four", "moe_tp_degree.*integer"),
        ("tp_degree: 8\nmoe_tp_degree: 4", "tp_degree: 16\nmoe_tp_degree: 8", "tp_degree.*at most 8 on h200"),
        ("experts: stored", "experts: blockwise", "experts.*expected bf16 or stored or w2_bf16 for cuda"),
        ("max_context_length: 512", "max_context_length: 2048", r"max_context_length.*at most seq_len \(1024\)"),
        ("seq_len: 1024", "seq_len: 1024\nenvironment: {A: b}", "environment.*expected none on h200"),
        ("seq_len: 1024", "seq_length: 1024", "seq_len"),
        ("batch_size: 1", "batch_size: 2147483648", "batch_size.*less than or equal to 2147483647"),
        ("batch_size: 1", "batch_size: true", "batch_size.*valid integer"),
        ("seq_len: 1024", "seq_len: [", "not valid YAML"),
        (GPU, "- 1", "expected a mapping"),
        ("instance: h200", "like: h300", r"like.*one of h200-ep4.*got 'h300'"),
        ("instance: h200", "like: [h200-tp8]", "like.*one of"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in GPU
    with pytest.raises(ConfigError, match=f"mine.yaml.*{says}"):
        read(GPU.replace(old, new), tmp_path)


def test_presets_that_differ_from_each_other_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimi_k2.plan.deployment.CONFIGS", tmp_path)
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / f"{name}.yaml").write_text(f"like: {other}")
    with pytest.raises(ConfigError, match=r"b\.yaml.*like.*expected one of , got 'a'"):
        Deployment.load("a")


NATIVE = "torch_native:\n  num_batched_tokens_buckets: [2048]"


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (NATIVE, NATIVE.replace("2048", "1024"), "num_batched_tokens_buckets.*ascending up to 2048"),
        ("[1, 8]", "[8, 1]", "num_seqs_buckets.*ascending up to 8"),
        ("kv_segment_size_buckets: [2048]", "kv_segment_size_buckets: [1024]", "kv_segment_size_buckets.*num_batched"),
        ("kv_segment_size_buckets: [2048]", "kv_segment_size_buckets: [768]", "kv_segment_size_buckets.*512, 1024"),
        ("[1024]", "[4096]", r"decode_context_length_buckets.*multiples of 128 below seq_len \(4096\)"),
        ("torch_native:", "environment: {A: b}\ntorch_native:", "environment.*none beside torch_native"),
        ("torch_native:", "neuron_config: {decode: layers}\ntorch_native:", "neuron_config.*none beside torch_native"),
        ("  num_seqs", "  on_device_sampling_config: {all_greedy: true}\n  num_seqs", "on_device_sampling_config"),
        ("  num_seqs", "  on_device_sampling_config: null\n  num_seqs", "enable_structured_outputs.*applies no mask"),
    ],
)
def test_what_the_line_without_nxdi_would_not_take_is_named(tmp_path: Path, old: str, new: str, says: str) -> None:
    text = (CONFIGS / "trn2-native-tp4-ep16.yaml").read_text()
    text = text.replace("  kv_", "  decode_context_length_buckets: [1024]\n  kv_")
    assert old in text
    with pytest.raises(ConfigError, match=f"mine.yaml.*{says}"):
        read(text.replace(old, new), tmp_path)
    with pytest.raises(ConfigError, match="NxDI does not run preset trn2-native"):
        Deployment.load("trn2-native-tp4-ep16").neuron_arguments()


def test_environment_of_a_process() -> None:
    expected = {
        "NEURON_LOGICAL_NC_CONFIG": "2", "NEURON_RT_VIRTUAL_CORE_SIZE": "2", "NEURON_RT_EXEC_TIMEOUT": "1800",
        "LOCAL_WORLD_SIZE": "64",
        "XLA_HANDLE_SPECIAL_SCALAR": "1", "UNSAFE_FP8FNCAST": "1",
    }  # fmt: skip
    assert environment(Deployment.load("trn2-tp32-ep2")) == expected
    other = {"NEURON_LOGICAL_NC_CONFIG": "1", "NEURON_RT_VIRTUAL_CORE_SIZE": "1", "LOCAL_WORLD_SIZE": "4"}
    assert runtime_environment(1, 4) == {**expected, **other}


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"token_generation_buckets": (512, 1024, 2048)}, r"token_generation_buckets.*last .* seq_len \(4096\)"),
        ({"context_encoding_buckets": (512, 4096)}, r"context_encoding_buckets.*last .* max_context_length \(2048\)"),
        ({"token_generation_buckets": (1024, 512, 4096)}, "token_generation_buckets.*ascending"),
        ({"enable_bucketing": False}, "context_encoding_buckets.*needs enable_bucketing"),
    ],
)
def test_buckets_that_no_length_fits_are_refused(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(json.dumps({"like": "trn2-tp32-ep2", "neuron_config": changed}), tmp_path)


def test_a_presets_own_arguments_and_environment_win_and_change_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    preset = Deployment.load("trn2-tp64-ep1")
    assert environment(preset)["UNSAFE_FP8FNCAST"] == "1"  # FP8 weights are named e4m3fn, which the compiler refuses
    changed = preset.model_copy(
        update={"compiler_args": {CONTEXT_ENCODING: ("-O3",)}, "environment": {"UNSAFE_FP8FNCAST": "0"}}
    )
    assert environment(changed)["UNSAFE_FP8FNCAST"] == "0"
    assert environment(changed)["NEURON_LOGICAL_NC_CONFIG"] == "2"
    assert compile_digest(changed) != compile_digest(preset)
    before = compile_digest(preset)
    monkeypatch.setattr("kimi_k2.neuron.compile.runtime_environment", lambda lnc, ranks: {"NEW": f"{lnc} {ranks}"})
    assert compile_digest(preset) != before


def test_flash_decoding_splits_the_cache_of_a_preset(tmp_path: Path) -> None:
    """By hand: 61 layers of 576 BF16 values a slot; each of 8 ranks an eighth of the positions and 128 reserved."""
    config = KimiK2Config.from_preset("kimi-k2-instruct-0905")
    preset = Deployment.load("trn2-tp64-ep1-128k")
    whole = preset.model_copy(update={"neuron_config": NeuronOptions()})
    split, full = (memory_plan(make_target(each, config)) for each in (preset, whole))
    assert full.parts["KV cache"] == 61 * 576 * 2 * 131072
    assert split.fits
    assert not full.fits
    assert any("over 4 ranks (flash decoding)" in line for line in advice(full))
    target = make_target(preset, config)
    decode = decode_counts(target)
    assert decode.read["cache"] == 61 * 576 * 2 * 131072 // 8
    groups = {
        (collective.kind, collective.nbytes): times
        for collective, times in decode.collectives.items()
        if collective.ranks == 8
    }
    # One head a rank: 8 heads' queries, 8 heads' log-sum-exps from 8 ranks, and one head's sum back.
    assert groups == {
        ("all-gather", 8 * 576 * 2): 61, ("all-gather", 8 * 8 * 4): 61, ("reduce-scatter", 512 * 4): 61,
    }  # fmt: skip


def test_a_preset_with_images(tmp_path: Path) -> None:
    """Its plan has the tower's weights and arrays; what the tower cannot be cut into is named."""
    config, name = KimiK2Config.from_preset("kimi-k2.5"), "trn2-tp64-ep1-images"
    target = load_target(name, config)
    memory, text = (memory_plan(each) for each in (target, replace(target, tower_ranks=None, tower_buckets=())))
    assert memory.scratch is not None and text.scratch is not None
    assert memory.parts == text.parts
    assert memory.scratch.tower > 0 == text.scratch.tower
    # Scores of 4,096 patches by one head: two arrays of them and two of the images' numbers, float32.
    assert memory.scratch.tower == int(1.1 * (4 * 4096**2 * 4 + 3 * 4096 * 1152 * 2))
    largest = replace(target, tower_buckets=((16384, 1),))
    assert memory_plan(largest).needed > memory.needed
    preset = (CONFIGS / f"{name}.yaml").read_text()
    for found, instead, message in (
        ("tp_degree: 16", "tp_degree: 32", "32 ranks cannot share the tower"),
        ("tp_degree: 16", "tp_degree: 128", "expected at most 64"),
        ("[256, 1]", "[250, 1]", "expected a multiple of 4 patches"),
        ("[256, 1]", "[256, 5]", "in up to 4 frames"),
        ("[256, 1]", "[0, 1]", "vision.buckets"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_target(read(preset.replace(found, instead), tmp_path), config)
    with pytest.raises(ConfigError, match="expected none on h200"):
        read(GPU + "vision: {tp_degree: 1, buckets: [[256, 1]]}", tmp_path)
    with pytest.raises(ConfigError, match="takes no images"):
        build_application(Deployment.load(name), KimiK2Config.from_preset("kimi-k2-instruct"), "kimi-k2-instruct")


def test_adapters_take_decode_to_xla(tmp_path: Path) -> None:
    """Kernels and tiles go, the adapters' bytes and a line in the plan come; their batch is the deployment's."""
    lora = {"max_loras": 4, "max_lora_rank": 16, "target_modules": ["q_b_proj", "o_proj"]}
    options = {"lora_config": lora, "save_sharded_checkpoint": False}
    raw = {"like": "trn2-tp32-ep2-nki-layers", "neuron_config": options}
    preset, config = read(json.dumps(raw), tmp_path), KimiK2Config.from_preset("kimi-k2-instruct-0905")
    assert (preset.experts, preset.neuron_config.decode, preset.layout(config).layers) == ("blockwise", "xla", False)
    assert preset.neuron_arguments()["lora_config"]["batch_size"] == 1
    report = make_report(make_target(preset, config))
    held = 4 * (1536 + 12288 + 8192 + 7168) // 64 + (1536 + 12288 // 64) + (8192 // 64 + 7168)
    assert report["rank_memory"]["parts"]["LoRA adapters"] == 2 * 61 * 16 * held
    console = Console(record=True, width=400)
    print_answer(report, console)
    assert "LoRA: decode runs on PyTorch operations" in console.export_text()
    options["save_sharded_checkpoint"] = True
    with pytest.raises(ConfigError, match=r"save_sharded_checkpoint.*expected False with lora_config"):
        read(json.dumps(raw), tmp_path)
