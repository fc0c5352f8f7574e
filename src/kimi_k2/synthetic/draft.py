"""Synthetic Eagle3 heads in the layout of the published ones: real names and shapes, random weights."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from kimi_k2.checkpoint.writer import write_json
from kimi_k2.config import KimiK2Config
from kimi_k2.drafts.config import D2T, T2D, DraftConfig, Form, head_shapes
from kimi_k2.files import Json, replace_file

PUBLISHED_VOCABULARY = 32000
_ARCHITECTURES: dict[Form, str] = {"llama": "LlamaForCausalLMEagle3", "mla": "Eagle3DeepseekV2ForCausalLM"}
_MLA = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def draft_fields(target: KimiK2Config, form: Form, **changes: Any) -> Json:
    """The config.json of a head for a target, as published heads have it.

    Args:
        target: gives the sizes; of the Llama form 64 heads of 128 become as many as the target has.
        form: which attention.
        changes: fields that differ.
    """
    heads, layers = target.num_attention_heads, target.num_hidden_layers
    fields: Json = {
        "architectures": [_ARCHITECTURES[form]],
        "model_type": "llama" if form == "llama" else "kimi_k2",
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6 if form == "llama" else 1e-5,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_position_embeddings,
        "rope_theta": 1e6 if form == "llama" else target.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": sorted({min(2, layers), layers // 2, max(layers - 3, 0)}),
            "use_aux_hidden_state": True,
        },
    }
    if form == "llama":
        return fields | {"head_dim": target.v_head_dim} | changes
    fields |= {name: getattr(target, name) for name in _MLA}
    if target.rope_scaling is not None:
        fields["rope_scaling"] = {"type": "yarn", **target.rope_scaling.model_dump(exclude_none=True)}
    return fields | changes


def write_synthetic_head(
    directory: str | Path,
    target: KimiK2Config,
    form: Form = "llama",
    *,
    seed: int = 0,
    tensors: dict[str, Tensor] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    **changes: Any,
) -> DraftConfig:
    """Write a head with random weights; with `draft_vocab_size` below the vocabulary also `d2t` and `t2d`.

    Args:
        directory: created if missing.
        target: of the model that it drafts for.
        form: which attention.
        seed: of the weights, and of which tokens the draft's vocabulary has.
        tensors: some that are no random ones, or are not there otherwise.
        dtype: of the weights.
        changes: fields of config.json that differ from `draft_fields`.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    fields = draft_fields(target, form, **changes)
    config = DraftConfig.from_dict(fields)
    generator = torch.Generator().manual_seed(seed)
    state_dict: dict[str, Tensor] = {}
    for name, shape in {**head_shapes(config, target), "lm_head.weight": _lm_head(config)}.items():
        if name == D2T:
            continue
        mean, std = (1.0, 0.1) if len(shape) == 1 else (0.0, 1 / math.sqrt(shape[-1]))
        state_dict[name] = (torch.randn(shape, generator=generator) * std + mean).to(dtype)
    if config.draft_vocab_size != config.vocab_size:
        tokens = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
        state_dict[D2T] = tokens - torch.arange(config.draft_vocab_size)
        state_dict[T2D] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, tokens, True)
    state_dict |= tensors or {}
    state_dict = {name: tensor.contiguous() for name, tensor in state_dict.items()}
    replace_file(directory / "model.safetensors", save(state_dict))
    write_json(directory / "config.json", fields)
    return config


def _lm_head(config: DraftConfig) -> tuple[int, int]:
    return config.draft_vocab_size, config.hidden_size
