"""Kinds of malformed config.json, index and quantization; `kinds_of_shards` and `kinds_of_tokenizers` have the rest."""

from __future__ import annotations

import math
import os
from typing import Any

from damage import (
    CONFIG,
    DELETED,
    EXPERT,
    INDEX,
    SHARD,
    Damage,
    Kind,
    as_directory,
    bound,
    config,
    edited,
    index,
    linked,
    placed,
    remove,
    sparse,
    write,
)

DEEP = "[" * 100_000 + "]" * 100_000


# What may lie in a file's place.
DEVICES = ("/dev/zero", "/dev/urandom", "/dev/full", "/dev/null", "/dev/tty", "/proc/kmsg", "/proc/self/mem", "nothing")


def of_file(name: str) -> dict[str, Damage]:
    """Ways in which a JSON file, a shard or a vocabulary can be none; only `missing` is right of some."""
    return {
        "missing": remove(name),
        "empty": write(name, ""),
        "cut off": write(name, "{"),
        "a list": write(name, "[]"),
        "null": write(name, "null"),
        "binary": write(name, bytes(range(255, 0, -1))),
        "UTF-16": write(name, '{"vocab_size": 768}'.encode("utf-16")),
        "EBCDIC": edited(name, lambda data: data.decode("latin-1").encode("cp500", "replace")),
        "an overlong form": edited(name, lambda data: b"\xc0\xaf" + data),
        "a byte order mark": edited(name, lambda data: b"\xef\xbb\xbf" + data),
        "a comment": edited(name, lambda data: b"// says\n" + data),
        "a NUL behind": edited(name, lambda data: data + b"\0"),
        "twice": edited(name, lambda data: data + data),
        "deep": write(name, DEEP),
        "300 MB": sparse(name, 300_000_000),
        "1 TB": sparse(name, 2**40),
        "a directory": as_directory(name),
        "a pipe": placed(name, os.mkfifo),
        "a socket": placed(name, bound),
        **{f"a link to {target}": placed(name, linked(target)) for target in (name, ".", *DEVICES)},
    }


# Field, what it becomes, and what the error names where that is not the field.
FIELDS: list[tuple[str, object, str | None]] = [
    *((name, DELETED, None) for name in ("hidden_size", "vocab_size", "num_hidden_layers", "n_routed_experts",
      "kv_lora_rank", "q_lora_rank", "rope_theta", "rms_norm_eps", "num_attention_heads", "norm_topk_prob")),
    ("hidden_size", "256", None), ("hidden_size", 256.5, None), ("hidden_size", None, None), ("hidden_size", [], None),
    ("hidden_size", True, None), ("hidden_size", -1, None), ("hidden_size", 0, None), ("hidden_size", 1e30, None),
    ("hidden_size", {"a": 1}, None),
    ("num_experts_per_tok", 17, None), ("n_group", 3, None), ("topk_group", 2, None), ("num_key_value_heads", 2, None),
    ("qk_rope_head_dim", 15, None), ("moe_layer_freq", 0, None), ("first_k_dense_replace", -1, None),
    ("routed_scaling_factor", 0, None), ("routed_scaling_factor", math.nan, None), ("rope_theta", math.inf, None),
    ("rope_theta", "x", None), ("rms_norm_eps", 0, None), ("hidden_act", "gelu", None), ("attention_bias", True, None),
    ("tie_word_embeddings", True, None), ("scoring_func", "softmax", None), ("topk_method", "greedy", None),
    ("model_type", "llama", None), ("vocab_size", 10**18, None), ("num_hidden_layers", 10**9, None),
    ("n_routed_experts", 10**9, None), ("max_position_embeddings", 0, None), ("num_nextn_predict_layers", 1, None),
    ("eos_token_id", 768, None), ("eos_token_id", "x", None), ("eos_token_id", [5, -1], None),
    ("bos_token_id", 10**9, None), ("chat_style", "poet", None),
    ("rope_scaling", "yarn", None), ("rope_scaling/type", "linear", "rope_scaling"), ("rope_scaling/factor", 0, None),
    ("rope_scaling/factor", "64", None), ("rope_scaling/beta_fast", math.nan, None),
    ("rope_scaling/original_max_position_embeddings", DELETED, None), ("rope_scaling/mscale", [], None),
    ("text_config", [], None), ("text_config", {}, "model_type"),
    # Another model than the one whose tensors lie beside it: a tensor is named.
    ("num_hidden_layers", 2, "model.layers.2."), ("num_hidden_layers", 4, "model.layers.3."),
    ("n_routed_experts", 17, "mlp.gate.weight"), ("n_routed_experts", 15, "mlp.gate.weight"),
    ("hidden_size", 512, "model.embed_tokens.weight"), ("intermediate_size", 512, "model.layers.0.mlp"),
    ("moe_intermediate_size", 256, "model.layers.1.mlp"), ("kv_lora_rank", 32, "kv_"), ("v_head_dim", 64, "self_attn"),
    ("vocab_size", 1024, "model.embed_tokens.weight"), ("q_lora_rank", 128, "self_attn.q_a_"),
    ("vocab_size", 9_000_000, "model.embed_tokens.weight"),  # before memory is claimed
    ("n_shared_experts", 2, "shared_experts"), ("n_shared_experts", 0, "shared_experts"),
    ("qk_nope_head_dim", 64, "self_attn"), ("first_k_dense_replace", 0, "model.layers.0.mlp"),
    ("first_k_dense_replace", 99, "model.layers.1.mlp"),
]  # fmt: skip

_WEIGHTS = "quantization_config/config_groups/group_0/weights"
FP8: list[tuple[str, object, str | None]] = [
    ("quantization_config", "fp8", "quantization_config"),
    ("quantization_config", {}, "quant_method"),
    ("quantization_config", None, "q_a_proj.weight"),
    ("quantization_config/quant_method", "awq", "quantization_config"),
    ("quantization_config/quant_method", ["fp8"], "quant_method"),
    ("quantization_config/weight_block_size", DELETED, "weight_block_size"),
    ("quantization_config/weight_block_size", 128, "weight_block_size"),
    ("quantization_config/weight_block_size", [128], "weight_block_size"),
    ("quantization_config/weight_block_size", [0, 128], "weight_block_size"),
    ("quantization_config/weight_block_size", ["a", 128], "weight_block_size"),
    ("quantization_config/weight_block_size", [128, 128, 128], "weight_block_size"),
    ("quantization_config/weight_block_size", [10**30, 128], "weight_block_size"),
    ("quantization_config/weight_block_size", [64, 64], "weight_scale_inv"),
    ("quantization_config/fmt", "e5m2", "fmt"),
    ("quantization_config/activation_scheme", "magic", "activation_scheme"),
]
INT4: list[tuple[str, object, str | None]] = [
    (f"{_WEIGHTS}/num_bits", 8, "num_bits"),
    (f"{_WEIGHTS}/num_bits", DELETED, "num_bits"),
    (f"{_WEIGHTS}/group_size", 0, "group_size"),
    (f"{_WEIGHTS}/group_size", "32", "group_size"),
    (f"{_WEIGHTS}/group_size", 64, "weight_scale"),
    (f"{_WEIGHTS}/group_size", 10**30, "group_size"),
    (f"{_WEIGHTS}/strategy", "channel", "strategy"),
    (f"{_WEIGHTS}/symmetric", False, "weight_zero_point"),
    (f"{_WEIGHTS}/type", "float", "type"),
    (f"{_WEIGHTS}/actorder", "group", "actorder"),
    (_WEIGHTS, 4, "weights"),
    ("quantization_config/config_groups", {}, "config_groups"),
    ("quantization_config/config_groups", [1], "config_groups"),
    ("quantization_config/config_groups/group_1", {}, "config_groups"),
    ("quantization_config/config_groups/group_0", 3, "group_0"),
    ("quantization_config/config_groups/group_0/targets", ["Conv"], "gate_proj.weight"),
    ("quantization_config/config_groups/group_0/targets", 3, "targets"),
    ("quantization_config/config_groups/group_0/targets", None, "gate_proj.weight"),
    ("quantization_config/config_groups/group_0/input_activations", {"num_bits": 8}, "input_activations"),
    ("quantization_config/ignore", 5, "ignore"),
    ("quantization_config/ignore", [3], "ignore"),
    ("quantization_config/ignore", "lm_head", "ignore"),
    ("quantization_config/ignore", ["re:("], "ignore"),
    ("quantization_config/ignore", ["re:(.+)+x$"], "weight"),
    ("quantization_config/ignore", ["re:(.|..)+[x-z]$"], "ignore"),
    ("quantization_config/ignore", ["re:" + "(a?)" * 60 + "a" * 60], "weight"),
    ("quantization_config/ignore", [], "weight"),
    ("quantization_config/format", "int-quantized", "format"),
]


def shard_of(name: object) -> Damage:
    """Another shard's name for an expert's weight in the index."""
    return index(lambda raw: raw["weight_map"].update({f"{EXPERT}.weight": name}))


def indexed(place: str, content: object) -> Damage:
    """A member of the index."""
    return index(lambda raw: raw.update({place: content}))


def many_shards(raw: dict[str, Any]) -> None:
    raw["weight_map"] = {f"t{number}": f"{number}.safetensors" for number in range(20_000)}


INDEXES: list[tuple[str, Damage, str]] = [
    ("weight_map a list", indexed("weight_map", []), INDEX),
    ("weight_map empty", indexed("weight_map", {}), INDEX),
    ("weight_map missing", index(lambda raw: raw.pop("weight_map")), INDEX),
    ("shard a number", shard_of(3), INDEX),
    ("shard null", shard_of(None), INDEX),
    ("shard a list", shard_of([SHARD]), INDEX),
    ("shard above", shard_of("../x.safetensors"), INDEX),
    ("shard absolute", shard_of("/etc/passwd"), INDEX),
    ("shard of another suffix", shard_of("pytorch_model.bin"), INDEX),
    ("shard missing", shard_of("model-9-of-9.safetensors"), "model-9-of-9.safetensors"),
    ("shard's name long", shard_of("x" * 5000 + ".safetensors"), INDEX),
    ("shard's name with NUL", shard_of("a\0b.safetensors"), INDEX),
    ("shard's name empty", shard_of(""), INDEX),
    ("another shard", shard_of("model-3-of-3.safetensors"), f"{EXPERT}.weight"),
    ("20,000 shards", index(many_shards), INDEX),
    ("a tensor too few", index(lambda raw: raw["weight_map"].pop(f"{EXPERT}.weight")), f"{EXPERT}.weight"),
    ("a tensor too many", index(lambda raw: raw["weight_map"].update({"ghost": SHARD})), "ghost"),
]
# Fields that say nothing.
METADATA: list[object] = [
    "x",
    {"total_size": "x"},
    {"total_size": math.inf},
    {"total_size": math.nan},
    {"total_size": -1},
]


def kinds() -> list[Kind]:
    """All of them."""
    found = [Kind(f"config.json: {way}", "fp8", damage, CONFIG) for way, damage in of_file(CONFIG).items()]
    found += [
        Kind(f"{base}: {place} = {_short(content)}", base, config(place, content), says or place.split("/")[-1])
        for base, rows in (("fp8", [*FIELDS, *FP8]), ("thinking", INT4))
        for place, content, says in rows
    ]
    found.append(Kind("fp8 said of BF16", "bf16", config("quantization_config", {"quant_method": "fp8"}), "block_size"))
    # Without an index a lone model.safetensors is looked for: the directory is named.
    found += [Kind(f"index: {way}", "fp8", damage, "safetensors") for way, damage in of_file(INDEX).items()]
    found += [Kind(f"index: {name}", "fp8", damage, says) for name, damage, says in INDEXES]
    found += [Kind(f"index: metadata {content}", "fp8", indexed("metadata", content), "", ()) for content in METADATA]
    return found


def _short(content: object) -> str:
    return "nothing" if content is DELETED else repr(content)[:40]
