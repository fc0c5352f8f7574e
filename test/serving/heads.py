"""Heads that know what often follows a token: what the target's last layer makes tells them which it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from kimi_k2.checkpoint.writer import write_json
from kimi_k2.drafts.config import Form
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.synthetic.draft import write_synthetic_head


def following(answers: Sequence[list[int]], words: int) -> list[int]:
    """A permutation of the vocabulary that puts what often follows a token in its place."""
    pairs = Counter(pair for tokens in answers for pair in pairwise(tokens))
    found: dict[int, int] = {}
    for (token, then), _ in pairs.most_common():
        if token not in found and then not in found.values():
            found[token] = then
    left = [token for token in range(words) if token not in found.values()]
    return [found[token] if token in found else left.pop() for token in range(words)]


def write_following_head(
    directory: Path, target: KimiK2ForCausalLM, answers: Sequence[list[int]], form: Form = "llama", **changes: Any
) -> list[int]:
    """A head of a target, and what it drafts behind each token: `following` of the target's answers.

    Embeddings are the target's.
    """
    config = target.config
    follows, hidden, layers = following(answers, config.vocab_size), config.hidden_size, config.num_hidden_layers
    rows = torch.empty(config.vocab_size, hidden)
    rows[follows] = target.lm_head.weight.detach().float().cpu()
    dtype: torch.dtype = changes.pop("dtype", torch.bfloat16)
    nothing, inner = torch.zeros(hidden, hidden), changes.get("intermediate_size", config.intermediate_size)
    values = config.num_attention_heads * int(changes.get("head_dim", config.v_head_dim))
    tensors = {
        "fc.weight": torch.cat((nothing, nothing, torch.eye(hidden)), dim=1),
        "lm_head.weight": rows,
        "norm.weight": target.model.norm.weight.detach().float().cpu(),
        "midlayer.self_attn.o_proj.weight": torch.zeros(hidden, values),
        "midlayer.mlp.down_proj.weight": torch.zeros(hidden, inner),
    }
    write_synthetic_head(
        directory, config, form, dtype=dtype, tensors={name: tensor.to(dtype) for name, tensor in tensors.items()},
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, layers]}, **changes,
    )  # fmt: skip
    return follows


def write_dflash_head(
    directory: Path, target: KimiK2ForCausalLM, answers: Sequence[list[int]]
) -> Callable[[int], list[int]]:
    """A DFlash head (Qwen3's layers) of one layer, and the three tokens that it drafts at once behind each token.

    Every query attends to what stands two places before it: the first of three masks to the target's hidden state
    behind its last layer, the second to the newest token, the third to the first mask; all else is zero.
    """
    config, heads, mask = target.config, 4, 7
    follows, hidden, words = following(answers, config.vocab_size), config.hidden_size, config.vocab_size
    size, theta = hidden // heads, 100.0
    angles = 2 * theta ** (-torch.arange(0, size, 2) / size)
    rows = torch.empty(words, hidden)
    rows[follows] = target.lm_head.weight.detach().float()
    eye, nothing, ones = torch.eye(hidden), torch.zeros(hidden, hidden), torch.ones(hidden)
    layer: dict[str, torch.Tensor] = {
        **{f"mlp.{name}_proj.weight": nothing for name in ("gate", "up", "down")},
        **{f"{name}_layernorm.weight": ones for name in ("input", "post_attention")},
        **{f"self_attn.{name}_proj.weight": nothing for name in "qk"},
        **{f"self_attn.{name}_proj.bias": ones * 0 for name in "vo"},
        "self_attn.q_proj.bias": torch.cat((angles.cos(), -angles.sin())).repeat(heads),
        "self_attn.k_proj.bias": torch.cat((torch.ones(size // 2), torch.zeros(size // 2))).repeat(heads),
        "self_attn.v_proj.weight": eye, "self_attn.o_proj.weight": eye * 1e5,
        "self_attn.q_norm.weight": torch.full((size,), 200.0), "self_attn.k_norm.weight": torch.ones(size),
    }  # fmt: skip
    tensors = {f"layers.0.{name}": tensor for name, tensor in layer.items()} | {
        "fc.weight": torch.cat((nothing, eye), dim=1), "hidden_norm.weight": ones, "lm_head.weight": rows,
        "norm.weight": target.model.norm.weight.detach().float(),
    }  # fmt: skip
    directory.mkdir()
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, directory / "model.safetensors")
    write_json(directory / "config.json", {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": hidden, "vocab_size": words,
        "intermediate_size": hidden, "num_hidden_layers": 1, "num_attention_heads": heads, "head_dim": size,
        "num_key_value_heads": heads, "attention_bias": True, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "max_position_embeddings": config.max_position_embeddings, "torch_dtype": "float32",
        "rope_parameters": {"rope_type": "default", "rope_theta": theta}, "tie_word_embeddings": False,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": [0, config.num_hidden_layers - 1]},
    })  # fmt: skip
    embedded = target.model.embed_tokens.weight.detach().float() * tensors["norm.weight"]
    second = (embedded @ rows.T).argmax(-1).tolist()
    return lambda token: [follows[token], second[token], second[mask]]
