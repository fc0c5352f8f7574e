"""Every bound on what is read from files: far above any published model, far below what hangs a machine."""

from __future__ import annotations

# Bytes of a safetensors header; safetensors itself stops there. K2-Instruct's are below 2 MB a shard.
SAFETENSORS_HEADER_BYTES = 100_000_000
# Bytes of any JSON file: an index of a million tensors has about this size.
JSON_BYTES = 200_000_000
# Bytes of a vocabulary or a template: the published ones have 2.8 MB and 10 kB.
TOKENIZER_BYTES = 2**26
# Bytes of YAML, which is read slowly: a preset has a few thousand, the front matter of a model card a few hundred.
YAML_BYTES = 2**16
# Levels of nesting in JSON and YAML; a config.json has four.
JSON_NESTING = 100
# Characters of a tensor's or a shard file's name; file systems stop at 255.
NAME_CHARACTERS = 255
SHARDS = 10_000
# Of whatever the command line and a preset count: tokens, sequences, ranks.
MOST = 2**31 - 1

# config.json: a list of a million tensors and more is built from so many experts; 83,328 are published.
EXPERTS_OF_ALL_LAYERS = 200_000
# Regular expressions in lists of modules; each is tried on each of 70,000 modules.
MODULE_PATTERNS = 1_000
_WIDTH = (1, 1_000_000)
# Least and most of each field; float32 arithmetic over or under them gives zeros, Inf or NaN.
CONFIG_FIELDS: dict[str, tuple[float, float]] = {
    "num_hidden_layers": (1, 1_000),
    "n_routed_experts": (1, 10_000),
    "n_shared_experts": (0, 1_000),
    "num_attention_heads": (1, 10_000),
    "vocab_size": (1, 10_000_000),
    "hidden_size": _WIDTH,
    "intermediate_size": _WIDTH,
    "moe_intermediate_size": _WIDTH,
    "q_lora_rank": _WIDTH,
    "kv_lora_rank": _WIDTH,
    "qk_nope_head_dim": _WIDTH,
    "qk_rope_head_dim": _WIDTH,
    "v_head_dim": _WIDTH,
    "max_position_embeddings": (1, 1_000_000_000),
    "rope_theta": (2, 1e12),
    "routed_scaling_factor": (1e-6, 1e6),
    "rms_norm_eps": (1e-20, 1),
    "first_k_dense_replace": (0, 1_000),
    "moe_layer_freq": (1, 1_000),
}
# Rows or columns that share a scale.
BLOCK_SIDE = 1_000_000
YARN_FIELDS: dict[str, tuple[float, float]] = {
    "factor": (1e-3, 1e6),
    "original_max_position_embeddings": (1, 1_000_000_000),
    "beta_fast": (1e-6, 1e6),
    "beta_slow": (1e-6, 1e6),
    "mscale": (0, 100),
    "mscale_all_dim": (0, 100),
    "attention_factor": (1e-3, 1e3),
}
VISION_FIELDS: dict[str, tuple[float, float]] = {
    "patch_size": (1, 1_000),
    "hidden_size": (1, 100_000),
    "num_attention_heads": (1, 1_000),
    "num_hidden_layers": (1, 1_000),
    "intermediate_size": _WIDTH,
    "pos_emb_height": (1, 4_096),
    "pos_emb_width": (1, 4_096),
    "pos_emb_time": (1, 1_024),
    "rope_theta": (2, 1e12),
    "projection_layer_norm_eps": (1e-20, 1),
}

# Images and videos. A decoded image of the most pixels has 268 MB with transparency; Pillow itself warns above 89 M.
MEDIA_BYTES = 2**30
IMAGE_PIXELS = 2**26
# Of one frame, and of all that are decoded: an hour of 1920 x 1080 at 30 frames a second.
FRAME_PIXELS = 2**25
VIDEO_PIXELS = 2**38
VIDEO_FRAMES = 2**19
# Of one image or video in the prompt; the members' context has as many.
MEDIA_TOKENS = 2**18
