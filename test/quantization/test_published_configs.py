"""Quantization configs as published: at either level, under either key, with either spelling of modules' names."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from kimi_k2.config import KimiK2Config, raw_preset
from kimi_k2.errors import ConfigError
from kimi_k2.quantization.stored import formats, parse_quantization

# How each library's list leaves attention and the first layer's MLP out, with and without K2.5's prefix.
IGNORED: dict[str, list[str]] = {
    "compressed": ["lm_head", "re:.*self_attn.*", "{}model.layers.0.mlp.up_proj"],
    "transformers": ["lm_head", r"{}model\.layers\..*\.self_attn", "{}model.layers.0.mlp"],
    "glob": ["{}lm_head", "{}model.layers.*.self_attn*", "{}model.layers.0.mlp*", "vision_tower*", "mm_projector*"],
    "substring": ["self_attn", "layers.0.mlp"],
    "gptq": ["re:.*lm_head", "re:.*self_attn.*", r"re:{}model\.layers\.0\..*"],
    "quark": ["lm_head", "re:.*self_attn.*", "{}model.layers.0.mlp.up_proj"],
}
FORMS = [name for name, held in formats().items() if held.method]
WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}


def unquantized_preset(name: str) -> dict[str, Any]:
    raw = raw_preset(name)
    raw.pop("quantization_config")
    raw.get("text_config", {}).pop("quantization_config", None)
    return raw


def group(**changed: Any) -> dict[str, Any]:
    weights = {**WEIGHTS, **changed.pop("weights", {})}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None, **changed}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": scheme}}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
PLACE = "quantization_config.config_groups.group_0"


@pytest.mark.parametrize(
    "raw",
    [
        {name: value for name, value in group().items() if name != "quant_method"},  # as older exports say it
        group(weights={"group_size": 64, "actorder": "static"}),
        group(weights={"strategy": "channel", "group_size": None}),
        group(weights={"strategy": "channel", "group_size": -1}),
        {**GPTQ, "desc_act": True},
        group(weights={"symmetric": False, "actorder": "weight", "observer": "minmax", "zp_dtype": "torch.int8"}),
        # W4AFP8: INT4 groups whose activations are FP8
        group(input_activations={"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}),
        group(input_activations={"num_bits": 4, "type": "float", "group_size": 16, "dynamic": True}),
        {**AWQ, "modules_to_not_convert": None},
        {**GPTQ, "checkpoint_format": "gptq_v2", "dynamic": {"-:.*self_attn.*": {}}, "meta": {"quantizer": ["x"]}},
        {
            "quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt"}, "ignore": ["lm_head"],
            "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
            "config_groups": {"group_0": {"targets": ["Linear"],
                "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
                "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}}},
        },
    ],
)  # fmt: skip
def test_forms_that_are_read(raw: dict[str, Any]) -> None:
    held = parse_quantization(raw)
    assert parse_quantization(json.loads(json.dumps(held.to_hf_dict()))) == held


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (group(weights={"symmetric": 0}), f"{PLACE}.weights.symmetric"),
        (group(weights={"strategy": "channel"}), f"{PLACE}.weights.strategy"),  # with a group's size
        (group(weights={"strategy": "channel", "group_size": None, "num_bits": 8}), f"{PLACE}.weights.num_bits"),
        (group(weights={"group_size": 31}), f"{PLACE}.weights.group_size"),
        (group(weights={"symmetric": False, "group_size": 31}), f"{PLACE}.weights.group_size"),
        (group(input_activations={"num_bits": 8, "type": "int"}), f"{PLACE}.input_activations"),
        (group(input_activations={"num_bits": 3, "type": "float"}), f"{PLACE}.input_activations"),
        ({name: value for name, value in AWQ.items() if name != "bits"}, "quantization_config.bits"),
        ({**AWQ, "group_size": 2**63}, "quantization_config.group_size"),
        ({"quant_method": "fp8", "weight_block_size": [128, 2**63]}, "quantization_config.weight_block_size.1"),
        ({**GPTQ, "desc_act": "yes"}, "quantization_config.desc_act"),
        ({**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, "quantization_config.dynamic"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_REAL"}, "quantization_config.quant_algo"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "exclude_modules": ["x"]},
            "quantization_config.exclude_modules",
        ),
        ({"quant_method": "quark", "global_quant_config": {}}, "quantization_config.global_quant_config.weight"),
        ({"quant_method": "w4afp8"}, "quantization_config.quant_method"),
        ({"quant_method": "bitsandbytes"}, "quantization_config.quant_method"),
        ({"quant_method": "x" * 100_000}, "quantization_config.quant_method"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
            "quantization_config.scale_fmt",
        ),
    ],
)
def test_what_is_not_read_is_named(raw: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_quantization(raw)
    assert caught.value.field == field
    assert len(str(caught.value)) < 1000


# Beside what `to_hf_dict` writes: fields that say nothing of what is stored, and ones that would.
HARMLESS: dict[str, dict[str, Any]] = {
    "compressed-tensors": {"version": "0.12.2", "global_compression_ratio": 1.5, "sparsity_config": {}},
    "fp8": {"scale_fmt": "float", "dequantize": False, "kv_cache_scheme": None},
    "modelopt": {"producer": {"name": "modelopt", "version": "0.39"}, "kv_cache_quant_algo": "FP8"},
    "awq": {"backend": "autoawq", "do_fuse": False},
    "gptq": {"meta": {"quantizer": ["gptqmodel:4.0"]}, "damp_percent": 0.01, "true_sequential": True, "sym": True},
    "quark": {"export": {"pack_method": "order"}, "algo_config": None, "softmax_quant_spec": None},
}
REFUSED: dict[str, dict[str, Any]] = {
    "compressed-tensors": {"transform_config": {"h": 1}, "sparsity_config": {"format": "2of4"}, "rotation": "spin"},
    "fp8": {"fmt": "e5m2", "weight_block_size": None, "modules_to_convert": ["x"], "scale_fmt": "ue8m0"},
    "modelopt": {"quant_algo": "W4A8_AWQ", "group_size": 32, "quantized_layers": {"x": {}}, "smooth": True},
    "awq": {"bits": 8, "version": "marlin", "zero_point": False, "do_fuse": True},
    "gptq": {"bits": 3, "pack_dtype": "int64", "lm_head": True, "checkpoint_format": "marlin"},
    "quark": {"layer_quant_config": {"x": {}}, "kv_cache_quant_config": {"x": {}}, "smooth": True},
}


@pytest.mark.parametrize("seed", range(8 * len(FORMS)))
def test_drawn_configs(seed: int) -> None:
    """A form, its places, its modules' prefix, harmless fields; every third has a field that is refused by name."""
    draw = random.Random(seed)
    name, prefix = FORMS[seed % len(FORMS)], draw.choice(["", "language_model."])
    form = formats()[name]
    assert form.method is not None
    ignored = IGNORED[name if name in IGNORED else form.rule]
    if draw.random() < 1 / 3:  # as transformers' class of K2.5 has its modules
        ignored, prefix = [entry.replace("{}model", "model.language_model") for entry in ignored], ""
    held = form(ignore=tuple(entry.format(prefix) for entry in ignored))
    said = json.loads(json.dumps(held.to_hf_dict()))
    said |= dict(draw.sample(sorted(HARMLESS[form.method].items(), key=str), draw.randint(0, 2)))
    wrong = None
    if draw.random() < 1 / 3:
        wrong, value = draw.choice(sorted(REFUSED[form.method].items(), key=str))
        said[wrong] = value
    key = draw.choice(["quantization_config", "compression_config"])
    raw = unquantized_preset(draw.choice(["kimi-k2.5", "kimi-k2-thinking"]))
    holders = draw.choice([[raw], [raw["text_config"]], [raw, raw["text_config"]]] if "text_config" in raw else [[raw]])
    for holder in holders:
        holder[key] = dict(draw.sample(sorted(said.items(), key=str), len(said)))
    if wrong is not None:
        with pytest.raises(ConfigError) as caught:
            KimiK2Config.from_dict(raw)
        assert f".{wrong}" in str(caught.value.field)
        return
    read = KimiK2Config.from_dict(raw).quantization
    assert read == held
    assert read.quantizes("model.layers.3.mlp.experts.7.up_proj")
    for module in ("layers.0.mlp.up_proj", "layers.30.self_attn.o_proj", "layers.3.mlp.gate"):
        assert not read.quantizes(f"model.{module}")
    assert not read.quantizes("lm_head")
