"""Heads as published: what fits loads and computes as vLLM's loaders say, what does not is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, LlamaConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from kimi_k2.config import KimiK2Config
from kimi_k2.drafts.config import DraftConfig, Form
from kimi_k2.drafts.head import Eagle3Head
from kimi_k2.engine.drafters import DraftCache
from kimi_k2.errors import (
    ConfigError,
    KimiK2Error,
    KimiK2Warning,
    MissingTensorError,
    TensorDtypeError,
    TensorShapeError,
    UnexpectedTensorError,
)
from kimi_k2.model.cache import LatentCache
from kimi_k2.model.decoder import KimiK2ForCausalLM
from kimi_k2.synthetic.config import tiny_config
from kimi_k2.synthetic.draft import draft_fields, write_synthetic_head

# SpecForge's configs/kimi-k2-eagle3.json, of which AQ-MedAI's heads are made.
PUBLISHED = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 30, 58], "use_aux_hidden_state": True},
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "max_position_embeddings": 131072,
    "max_window_layers": 48,
    "model_type": "kimi_k2",
    "num_attention_heads": 64,
    "num_hidden_layers": 1,
    "num_key_value_heads": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.53.2",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 163840,
    "draft_vocab_size": 32000,
}
CONFIG = tiny_config(num_hidden_layers=2, n_routed_experts=4, num_experts_per_tok=2, quantization_config=None)


@pytest.fixture(scope="module")
def target() -> KimiK2ForCausalLM:
    model = KimiK2ForCausalLM(CONFIG)
    generator = torch.Generator().manual_seed(3)
    for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
        weight.copy_(torch.randn(weight.shape, generator=generator))
    return model


def run(head: Eagle3Head, tokens: Tensor, hidden: Tensor, cut: int) -> tuple[Tensor, Tensor]:
    """All places, in two passes that part at `cut`."""
    length = tokens.shape[1]
    cache = DraftCache(LatentCache(CONFIG, len(tokens), length), head.cache_dim, head.dtype)
    positions = torch.arange(length).expand_as(tokens)
    passes = [
        head(tokens[:, columns], hidden[:, columns], positions[:, columns], cache, columns.stop)
        for columns in (slice(0, cut), slice(cut, length))
    ]
    normed, after = (torch.cat(pieces, dim=1) for pieces in zip(*passes, strict=True))
    return normed, after


def modules(fields: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Attention, RoPE and MLP of transformers."""
    sizes = {name: fields[name] for name in fields if name not in ("architectures", "model_type", "eagle_config")}
    if "kv_lora_rank" in fields:
        deepseek = DeepseekV3Config(**sizes, attn_implementation="eager", mlp_bias=False)
        return DeepseekV3Attention(deepseek, 0), DeepseekV3RotaryEmbedding(deepseek), LlamaMLP(deepseek)
    llama = LlamaConfig(**sizes, attn_implementation="eager")
    return LlamaAttention(llama, 0), LlamaRotaryEmbedding(llama), LlamaMLP(llama)


def reference(
    stored: dict[str, Tensor], config: DraftConfig, fields: dict[str, Any], embeds: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """The head out of transformers' modules, in vLLM's order."""
    attention, rotary, mlp = modules(fields)

    def take(module: torch.nn.Module, name: str) -> Any:
        state = {key.removeprefix(f"{name}."): value.float() for key, value in stored.items() if key.startswith(name)}
        for key, value in state.items():
            module.get_submodule(key.rpartition(".")[0]).weight = torch.nn.Parameter(value)
        return module

    norms = {}
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        norms[name] = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        norms[name].weight = torch.nn.Parameter(stored[f"{name}.weight"].float())
    take(attention, "midlayer.self_attn")
    take(mlp, "midlayer.mlp")
    length = embeds.shape[1]
    normed = norms["midlayer.hidden_norm"](hidden)
    residual = normed if config.norm_before_residual else hidden
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    cos_sin = rotary(embeds, torch.arange(length)[None])
    both = torch.cat((norms["midlayer.input_layernorm"](embeds), normed), dim=-1)
    x = residual + attention(both, cos_sin, mask)[0]
    x = x + mlp(norms["midlayer.post_attention_layernorm"](x))
    out = norms["norm"](x)
    return out, out if config.norm_output else x


@pytest.mark.parametrize(
    ("form", "layer", "changes"),
    [
        ("llama", "midlayer.", {}),
        ("llama", "layers.0.", {"norm_before_residual": True, "num_key_value_heads": 2}),
        ("llama", "midlayer.", {"fc_norm": True, "norm_output": True}),
        ("mla", "layers.0.", {"rms_norm_eps": 1e-6}),
    ],
)
def test_a_head_is_that_of_transformers_modules(
    form: Form, layer: str, changes: dict[str, Any], target: KimiK2ForCausalLM, tmp_path: Path
) -> None:
    """Under SpecForge's names, and under those of files that are exported for vLLM."""
    config = write_synthetic_head(tmp_path, CONFIG, form, draft_vocab_size=96, **changes)
    stored = load_file(tmp_path / "model.safetensors")
    save_file({k.replace("midlayer.", layer): v for k, v in stored.items()}, tmp_path / "model.safetensors")
    head = Eagle3Head.from_pretrained(tmp_path, target)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, CONFIG.vocab_size, (2, 7), generator=generator)
    aux = torch.randn(2, 7, len(head.aux_layers) * CONFIG.hidden_size, generator=generator)
    states = aux.chunk(len(head.aux_layers), dim=-1)
    if config.fc_norm:
        states = tuple(
            torch.nn.functional.rms_norm(state, state.shape[-1:], stored[f"fc_norm.{i}.weight"].float(), 1e-6)
            for i, state in enumerate(states)
        )
    hidden = torch.cat(states, dim=-1) @ stored["fc.weight"].float().T
    torch.testing.assert_close(head.fuse(aux), hidden, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        fields = draft_fields(CONFIG, form, **changes)
        expected = reference(stored, config, fields, target.model.embed_tokens(tokens), hidden)
    found = run(head, tokens, hidden, cut=4)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5)
    logits = head.logits(found[0])
    torch.testing.assert_close(logits, expected[0] @ stored["lm_head.weight"].float().T, rtol=1e-4, atol=1e-4)
    assert head.to_target(torch.arange(96)).tolist() == stored["t2d"].nonzero().flatten().tolist()


def test_published_configuration() -> None:
    config = DraftConfig.from_dict(PUBLISHED)
    assert config.form == "llama" and config.aux_layers == (2, 30, 58) and config.draft_vocab_size == 32000
    config.fit(KimiK2Config.from_preset("kimi-k2-instruct-0905"))
    unsaid = {**PUBLISHED, "eagle_config": {"use_aux_hidden_state": True, "parallel_draft_step": None}}
    assert DraftConfig.from_dict(unsaid).layers(KimiK2Config.from_preset("kimi-k2.5")) == (2, 30, 58)


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("architectures", ["LlamaForCausalLM"], "architectures"),
        ("attention_bias", True, "attention_bias"),
        ("num_hidden_layers", 2, "num_hidden_layers"),
        ("mystery", 1, "mystery"),
        ("eagle_config", {"mystery": 1}, "eagle_config.mystery"),
        ("eagle_config", {"use_aux_hidden_state": False}, "use_aux_hidden_state"),
        ("eagle_config", {"use_last_layernorm": False}, "use_last_layernorm"),
        ("eagle_config", {"use_mtp_layernorm": True}, "use_mtp_layernorm"),
        ("eagle_config", {"next_layer_regular": False}, "next_layer_regular"),
        ("eagle_config", {"parallel_draft_step": 4}, "parallel_draft_step"),
        ("eagle_config", {"eagle_aux_hidden_state_layer_ids": [30, 2]}, "layer_ids"),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}, "rope_scaling"),
        ("logit_scale", 0.5, "logit_scale"),
        ("hidden_size", "7168", "hidden_size"),
        ("num_key_value_heads", 7, "num_key_value_heads"),
        ("quantization_config", {"quant_method": "fp8"}, "quantization_config"),
    ],
)
def test_fields_that_change_the_head_are_refused(field: str, value: Any, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DraftConfig.from_dict({**PUBLISHED, field: value}, file="config.json")
    assert named in str(caught.value.field)


@pytest.mark.parametrize(
    ("change", "named", "says"),
    [
        ({"vocab_size": 700}, "vocab_size", "expected 768"),
        ({"hidden_size": 128}, "hidden_size", "expected 256"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, "layer_ids", "0 to 2, got 3"),
    ],
)
def test_a_head_of_another_target_is_refused(change: dict[str, Any], named: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"{named}.*{says}"):
        DraftConfig.from_dict(draft_fields(CONFIG, "llama", **change)).fit(CONFIG)


@pytest.mark.parametrize(
    ("name", "tensor", "kind"),
    [
        ("midlayer.mlp.up_proj.weight", None, MissingTensorError),
        ("d2t", None, MissingTensorError),
        ("midlayer.mlp.gate.weight", torch.zeros(4, 256), UnexpectedTensorError),
        ("fc.weight", torch.zeros(256, 256), TensorShapeError),
        ("d2t", torch.zeros(96), TensorDtypeError),
        ("d2t", torch.full((96,), 767), TensorShapeError),
        ("t2d", torch.ones(768, dtype=torch.bool), TensorShapeError),
    ],
)
def test_tensors_that_are_no_such_head_are_refused(
    name: str, tensor: Tensor | None, kind: type[KimiK2Error], target: KimiK2ForCausalLM, tmp_path: Path
) -> None:
    write_synthetic_head(tmp_path, CONFIG, draft_vocab_size=96)
    stored = load_file(tmp_path / "model.safetensors")
    stored.pop(name, None)
    save_file(stored | ({} if tensor is None else {name: tensor}), tmp_path / "model.safetensors")
    with pytest.raises(kind, match=name.replace(".", r"\.")):
        Eagle3Head.from_pretrained(tmp_path, target)


def test_a_head_of_another_member_is_told_by_its_metadata(target: KimiK2ForCausalLM, tmp_path: Path) -> None:
    head, model = tmp_path / "head", tmp_path / "Kimi-K2-Instruct-0905"
    write_synthetic_head(head, CONFIG)
    (head / "README.md").write_text("---\nbase_model: moonshotai/Kimi-K2.5\n---\n# A head\n")
    model.mkdir()
    (model / "config.json").write_text(json.dumps({}))
    with pytest.warns(KimiK2Warning, match=r"for k2\.5, and the target is k2;"):
        Eagle3Head.from_pretrained(head, target, target_directory=model)
