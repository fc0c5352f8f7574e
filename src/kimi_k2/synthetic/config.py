"""Published configurations shrunk to a few megabytes, and in other stored formats."""

from __future__ import annotations

from typing import Any

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.quantization.stored import formats
from kimi_k2.tokenization.special_tokens import NUM_SPECIAL_SLOTS

# Offsets into the special slots at the end of the vocabulary.
BOS, EOS, IM_END, PAD = 0, 1, 2, 255

TINY: dict[str, Any] = {
    "vocab_size": 768,
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "max_position_embeddings": 8192,
}

# Odd where it may be, so that no two sizes are mistaken for each other.
TINY_VISION: dict[str, Any] = {
    "vt_hidden_size": 48,
    "mm_hidden_size": 48,
    "vt_num_attention_heads": 3,
    "vt_num_hidden_layers": 2,
    "vt_intermediate_size": 80,
    "init_pos_emb_height": 10,
    "init_pos_emb_width": 10,
}


def tiny_config(preset: str = "kimi-k2-instruct-0905", *, vision: Any = TINY_VISION, **overrides: Any) -> KimiK2Config:
    """A published configuration shrunk to a few megabytes; YaRN, router and quantization stay as published.

    Args:
        preset: name of the published configuration.
        vision: fields of the vision tower, where there is one, that differ from the published ones.
        overrides: any fields of KimiK2Config, Hugging Face's names.
    """
    vocab_size = overrides.get("vocab_size", TINY["vocab_size"])
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    special = {field: vocab_size - NUM_SPECIAL_SLOTS + offset for field, offset in ids.items()}
    return KimiK2Config.from_preset(preset, vision=vision, **{**TINY, **special, **overrides})


def with_format(config: KimiK2Config, fmt: str) -> KimiK2Config:
    """The same model stored in a format of `quantization.stored.formats`: `fp8`, `int4`, `bf16` ..."""
    if fmt not in formats():
        raise ConfigError(f"expected one of {', '.join(formats())}, got {fmt!r}", field="format")
    chosen = formats()[fmt]
    return config.model_copy(update={"quantization": chosen() if chosen.method else None})


def hf_config(config: KimiK2Config) -> dict[str, Any]:
    """The config.json content, wrapped in `text_config` if the names carry a prefix."""
    plain = config.to_hf_dict()
    if not config.tensor_prefix:
        return plain
    outer: dict[str, Any] = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "tie_word_embeddings": False,
        "text_config": plain,
    }
    if "quantization_config" in plain:
        outer["quantization_config"] = plain["quantization_config"]
    if config.vision is not None:
        vision = config.vision
        # Under transformers' names too: vLLM reads these, or takes its defaults.
        transformers = vision.model_dump(mode="json", exclude={"image_token_id", "video_token_id"})
        outer["vision_config"] = {**transformers, **vision.to_hf_dict(), "text_hidden_size": config.hidden_size}
        outer["projection_hidden_size"] = vision.hidden_size
        outer["media_placeholder_token_id"] = outer["image_token_id"] = vision.image_token_id
        outer |= {"use_unified_vision_chunk": True, "video_placeholder": "<|kimi_k25_video_placeholder|>"}
        if vision.video_token_id is not None:
            outer["video_token_id"] = vision.video_token_id
    return outer
