"""Every field of a config.json is obeyed or refused by its name: unknown ones, K2.5's two levels, nested objects."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from kimi_k2.config import KimiK2Config, raw_preset
from kimi_k2.errors import ConfigError
from kimi_k2.files import Json
from kimi_k2.quantization.int4_group import Int4GroupFormat
from kimi_k2.quantization.modules import names_module

# What transformers 4.56 wrote into K2.5's text_config (ai-dynamo/aiconfigurator keeps a copy of NVIDIA's file).
DUMPED: Json = {
    "_name_or_path": "", "add_cross_attention": False, "auto_map": {"AutoConfig": "x.Y"}, "bad_words_ids": None,
    "begin_suppress_tokens": None, "chunk_size_feed_forward": 0, "cross_attention_hidden_size": None,
    "decoder_start_token_id": None, "diversity_penalty": 0.0, "do_sample": False, "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0, "ep_size": 1, "exponential_decay_length_penalty": None, "finetuning_task": None,
    "forced_bos_token_id": None, "forced_eos_token_id": None, "id2label": {"0": "LABEL_0"}, "is_decoder": False,
    "is_encoder_decoder": False, "label2id": {"LABEL_0": 0}, "length_penalty": 1.0, "max_length": 20, "min_length": 0,
    "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1,
    "output_attentions": False, "output_hidden_states": False, "output_scores": False, "prefix": None,
    "pretraining_tp": 1, "problem_type": None, "pruned_heads": {}, "remove_invalid_values": False,
    "repetition_penalty": 1.0, "return_dict": True, "return_dict_in_generate": False, "sep_token_id": None,
    "seq_aux": True, "suppress_tokens": None, "task_specific_params": None, "temperature": 1.0,
    "tf_legacy_loss": False, "tie_encoder_decoder": False, "tokenizer_class": None, "top_k": 50, "top_p": 1.0,
    "torchscript": False, "transformers_version": "4.56.2", "typical_p": 1.0, "use_bfloat16": False, "use_cache": True,
    "aux_loss_alpha": 0.001, "attention_dropout": 0.0,
}  # fmt: skip


def at(raw: Json, path: str) -> tuple[Json, str]:
    """The object that holds a dotted name, and the name's end."""
    *levels, last = path.split(".")
    for level in levels:
        raw = raw[level]
    return raw, last


def changed(name: str, path: str, value: Any) -> Json:
    raw = raw_preset(name)
    holder, last = at(raw, path)
    holder[last] = value
    return raw


GROUP = "quantization_config.config_groups.group_0"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("norm_topk_prob", 1),
        ("bos_token_id", 163840),
        ("quantization_config", {"quant_method": "hqq"}),
        ("quantization_config", {"quant_method": "awq"}),
        ("quantization_config", {"quant_method": "fp8"}),
        ("swiglu_limit", 7.0),
        ("index_topk", 2048),
        ("sliding_window", 128),
        ("mlp_bias", True),
        ("head_dim", 192),
        ("qk_head_dim", 64),
        ("partial_rotary_factor", 0.5),
        ("layer_types", ["sliding_attention"] * 61),
        ("layer_types", "full_attention"),
        ("rope_interleave", False),
        ("rope_interleave", None),
        ("original_max_position_embeddings", 8192),
        ("num_local_experts", 8),
        ("quantisation_config", {}),
        ("tensor_prefix", "language_model."),
        ("rope_scaling.low_freq_factor", 1.0),
        ("rope_scaling.partial_rotary_factor", 0.5),
        ("rope_scaling.truncate", None),
        ("architectures", ["DeepseekV32ForCausalLM"]),
        ("quantization_config.sparsity_config", {"format": "sparse-24-bitmask"}),
        ("quantization_config.transform_config", {"config_groups": {}, "x": 1}),
        ("quantization_config.quantization_status", "frozen"),
        ("quantization_config.rotation", "hadamard"),
        (f"{GROUP}.output_activations", {"num_bits": 8}),
        (f"{GROUP}.format", "naive-quantized"),
        (f"{GROUP}.bias", {}),
        (f"{GROUP}.weights.block_structure", [128, 128]),
        (f"{GROUP}.weights.zero_point", 8),
        (f"{GROUP}.weights.group_size", 31),
        (
            "quantization_config.kv_cache_scheme",
            {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": True},
        ),
        ("routed_scaling_factor", 1e308),
        ("rope_theta", 1e-300),
        ("rope_scaling.mscale_all_dim", 1e300),
        ("rms_norm_eps", 1e-300),
        ("first_k_dense_replace", 10**9),
        ("moe_layer_freq", 2**63),
        (f"{GROUP}.weights.group_size", 10**400),
    ],
)
@pytest.mark.parametrize("name", ["kimi-k2-thinking", "kimi-k2.5"])
def test_a_field_that_changes_numbers_is_refused(name: str, path: str, value: Any) -> None:
    prefix = "text_config." if name == "kimi-k2.5" else ""
    with pytest.raises(ConfigError) as caught:
        KimiK2Config.from_dict(changed(name, prefix + path, value))
    field = caught.value.field or ""
    assert field == prefix + path or field.startswith(f"{prefix}{path}.")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("tie_word_embeddings", True),
        ("swiglu_limit", 7.0),
        ("hidden_size", 4096),
        ("rope_scaling", {"type": "yarn", "factor": 2.0}),
        ("quantization_config.ignore", ["lm_head"]),
        ("vision_config.window", 7),
        ("vision_config", []),
        ("vision_config.merge_type", "sd2"),
        ("vision_config.mm_projector_type", "mlp"),
        ("vision_config.hidden_act", "gelu"),
        ("vision_config", {"vt_hidden_size": "1152"}),
        ("vision_config", {"vt_hidden_size": 1150}),
        ("vision_config.vt_num_hidden_layers", 0),
        ("vision_config.vt_num_hidden_layers", 10**6),
        ("vision_config.merge_kernel_size", [2]),
        ("vision_config.merge_kernel_size", [99, 2]),
        ("vision_config.hidden_size", 48),  # beside vt_hidden_size
        ("vision_config.mm_hidden_size", 1024),
        ("vision_config.text_hidden_size", 4096),
        ("projection_hidden_size", 1024),
        ("media_placeholder_token_id", 163840),
        ("video_token_id", -1),
        ("vision_config.rope_parameters", {"rope_type": "axial", "factor": 2.0}),
        ("vision_config.rope_parameters", {"rope_type": "yarn"}),
        ("projection_layer_norm_eps", 1e-6),
        ("image_token_id", 163604),
        ("model_type", "kimi_vl2"),
    ],
)
def test_the_level_around_the_language_model(path: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        KimiK2Config.from_dict(changed("kimi-k2.5", path, value))
    field = caught.value.field or ""
    assert field == path.removesuffix(".ignore") or field.startswith(f"{path}.")


def test_what_publishers_and_transformers_write_is_accepted() -> None:
    plain, wrapped = raw_preset("kimi-k2-thinking"), raw_preset("kimi-k2.5")
    assert KimiK2Config.from_dict({**DUMPED, **plain}) == KimiK2Config.from_dict(plain)
    around = {"ignore_index": -100, "use_unified_vision_chunk": True, "video_placeholder": "x", "dtype": "bfloat16"}
    text = {**DUMPED, **wrapped["text_config"], "qk_head_dim": 192, "head_dim": 64, "rope_interleave": True}
    vision = {**wrapped["vision_config"], "_attn_implementation": "flash_attention_2"}
    whole = {**wrapped, **around, "text_config": text, "vision_config": vision, "hidden_size": 7168}
    assert KimiK2Config.from_dict(whole) == KimiK2Config.from_dict(wrapped)


def test_transformers_own_class_of_k25_reads_back() -> None:
    kimi_k25 = pytest.importorskip("transformers.models.kimi_k25", reason="this transformers has no kimi_k25")
    raw = raw_preset("kimi-k2.5")
    ours = KimiK2Config.from_dict(raw)
    for whole in (True, False):
        theirs = kimi_k25.Kimi_K25Config(**copy.deepcopy(raw))
        saved = theirs.to_dict() if whole else json.loads(theirs.to_json_string())
        read = KimiK2Config.from_dict(saved)
        assert read.rope_scaling == ours.rope_scaling
        assert read.quantization == ours.quantization
        assert (read.vision or ours).model_copy(update={"video_token_id": None}) == ours.vision


def test_a_missing_width_is_named_before_what_repeats_it() -> None:
    raw = changed("kimi-k2.5", "vision_config.text_hidden_size", 7168)
    del raw["text_config"]["hidden_size"]
    with pytest.raises(ConfigError, match=r"'text_config\.hidden_size': missing"):
        KimiK2Config.from_dict(raw)


def test_rope_scaling_comes_before_rope_parameters_as_in_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    raw = raw_preset("kimi-k2-thinking")
    raw["rope_parameters"] = {**raw["rope_scaling"], "factor": 4.0, "rope_theta": 10000.0}
    kept = {key: value for key, value in raw.items() if key not in ("model_type", "quantization_config")}
    theirs = transformers.DeepseekV3Config(**copy.deepcopy(kept)).rope_parameters
    ours = KimiK2Config.from_dict(raw)
    assert ours.rope_scaling is not None
    assert (ours.rope_scaling.factor, ours.rope_theta) == (theirs["factor"], theirs["rope_theta"])


def test_lists_of_modules_by_the_rules_of_their_libraries() -> None:
    quantizers = pytest.importorskip("transformers.quantizers.quantizers_utils")
    match = pytest.importorskip("compressed_tensors.utils.match")
    root = "model.layers.3"
    modules = [f"{root}.mlp.down_proj", f"{root}.mlp.experts.7.up_proj", f"{root}.self_attn.o_proj", "lm_head"]
    modules += [f"model.layers.30.{rest}" for rest in ("mlp.gate_proj", "mlp.shared_experts.up_proj")]
    for entry in ("lm_head", "model.layers.3", "layers.3", "o_proj", "model.layers.*.mlp", r".*\.self_attn", "model.",
                  "model.layers.3.mlp.down_proj", "experts.7"):  # fmt: skip
        for module in modules:
            assert names_module((entry,), "transformers", module) == (
                not quantizers.should_convert_module(module, [entry])
            ), (entry, module)
    for entry in (
        "lm_head",
        r"re:.*self_attn.*",
        r"re:model\.layers\.3\..*",
        "model.layers.3",
        r"re:.*mlp\.(gate|up)_proj",
    ):
        for module in modules:
            assert names_module((entry,), "compressed", module) == match.match_name(module, entry), (entry, module)
    for entry in ("language_model.model.layers.3.mlp*", "model.layers.3.mlp*", "model.language_model.layers.3.mlp*"):
        assert [names_module((entry,), "glob", module) for module in modules] == [
            True,
            True,
            False,
            False,
            False,
            False,
        ]
    for entry in (r"re:language_model\.lm_head", "language_model.lm_head", r"re:.*language_model\.lm_head$"):
        assert [names_module((entry,), "compressed", module) for module in modules] == [False] * 3 + [True] + [
            False
        ] * 2


def test_a_long_list_of_names_takes_no_longer_a_module() -> None:
    ignore = tuple(
        f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(260) for expert in range(384)
    )
    held = Int4GroupFormat(ignore=ignore)
    assert sum(held.quantizes(f"model.layers.{layer}.self_attn.o_proj") for layer in range(70_000)) == 70_000
    assert not held.quantizes(ignore[-1])


def test_expressions_are_bounded() -> None:
    with pytest.raises(ConfigError, match="at most 1000 expressions, got 1001") as caught:
        KimiK2Config.from_dict(changed("kimi-k2-thinking", "quantization_config.ignore", [r"re:a.*"] * 1001))
    assert caught.value.field == "quantization_config.ignore"
