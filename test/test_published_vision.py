"""Kimi-K2.5's published config.json and tensors of the tower against the preset and the names that the reader expects.

Both were printed by transformers from the published checkpoint, in a report that a public repository keeps.
"""

from __future__ import annotations

from typing import Any

from kimi_k2.checkpoint.names import vision_tensors
from kimi_k2.config import KimiK2Config

VISION = {
    "init_pos_emb_height": 64,
    "init_pos_emb_time": 4,
    "init_pos_emb_width": 64,
    "merge_kernel_size": [2, 2],
    "merge_type": "sd2_tpool",
    "mm_hidden_size": 1152,
    "mm_projector_type": "patchmerger",
    "model_type": "",
    "patch_size": 14,
    "pos_emb_type": "divided_fixed",
    "projector_hidden_act": "gelu",
    "projector_ln_eps": 1e-05,
    "text_hidden_size": 7168,
    "video_attn_type": "spatial_temporal",
    "vt_hidden_size": 1152,
    "vt_intermediate_size": 4304,
    "vt_num_attention_heads": 16,
    "vt_num_hidden_layers": 27,
}
QUANTIZATION: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
                "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": [
        "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}  # fmt: skip
TEXT = {
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001, "bos_token_id": 163584, "dtype": "bfloat16", "eos_token_id": 163585, "ep_size": 1,
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 262144, "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61,
    "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "pad_token_id": 163839, "pretraining_tp": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "quantization_config": QUANTIZATION,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "rope_theta": 50000.0, "rope_type": "yarn", "type": "yarn",
    },
    "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "use_cache": True, "v_head_dim": 128,
    "vocab_size": 163840,
}  # fmt: skip
# Fields of a printed configuration that say nothing of the model are left out.
PUBLISHED = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163585,
    "ignore_index": -100,
    "media_placeholder_token_id": 163605,
    "model_type": "kimi_k25",
    "pad_token_id": 163839,
    "quantization_config": QUANTIZATION,
    "text_config": TEXT,
    "tie_word_embeddings": False,
    "use_unified_vision_chunk": True,
    "video_placeholder": "<|kimi_k25_video_placeholder|>",
    "vision_config": VISION,
}
# 27 blocks have the same.
BLOCK = {
    "mlp.fc0.bias": [4304], "mlp.fc0.weight": [4304, 1152], "mlp.fc1.bias": [1152], "mlp.fc1.weight": [1152, 4304],
    "norm0.bias": [1152], "norm0.weight": [1152], "norm1.bias": [1152], "norm1.weight": [1152],
    "wo.bias": [1152], "wo.weight": [1152, 1152], "wqkv.bias": [3456], "wqkv.weight": [3456, 1152],
}  # fmt: skip
OTHERS = {
    "mm_projector.pre_norm.bias": [1152], "mm_projector.pre_norm.weight": [1152],
    "mm_projector.proj.0.bias": [4608], "mm_projector.proj.0.weight": [4608, 4608],
    "mm_projector.proj.2.bias": [7168], "mm_projector.proj.2.weight": [7168, 4608],
    "vision_tower.encoder.final_layernorm.bias": [1152], "vision_tower.encoder.final_layernorm.weight": [1152],
    "vision_tower.patch_embed.pos_emb.weight": [64, 64, 1152],
    "vision_tower.patch_embed.proj.bias": [1152], "vision_tower.patch_embed.proj.weight": [1152, 3, 14, 14],
}  # fmt: skip


def test_the_preset_is_the_published_config() -> None:
    preset = KimiK2Config.from_preset("kimi-k2.5")
    published = KimiK2Config.from_dict(PUBLISHED)
    for later in ("kimi-k2.5", "kimi-k2.6", "kimi-k2.7-code"):
        assert KimiK2Config.from_preset(later).vision == published.vision
    assert preset.vision is not None
    assert preset.vision.media_token_ids == (163605,)
    # transformers prints the class that it read the text part with; the template's style is ours to name.
    same = {"model_type": preset.model_type, "chat_style": preset.chat_style}
    assert published.model_copy(update=same) == preset


def test_the_reader_expects_the_published_tensors() -> None:
    blocks = {
        f"vision_tower.encoder.blocks.{block}.{name}": shape for block in range(27) for name, shape in BLOCK.items()
    }
    expected = {spec.name: list(spec.shape) for spec in vision_tensors(KimiK2Config.from_preset("kimi-k2.5"))}
    assert expected == blocks | OTHERS
