"""Every bound on what is read from files: far above any published model, far below what hangs a machine."""

from __future__ import annotations

# Bytes of a safetensors header; safetensors itself stops there. K2-Instruct's are below 2 MB a shard.
SAFETENSORS_HEADER_BYTES = 100_000_000
# Bytes of any JSON file: an index of a million tensors has about this size.
JSON_BYTES = 200_000_000
# Levels of nesting in JSON; a config.json has four.
JSON_NESTING = 100
# Characters of a tensor's or a shard file's name; file systems stop at 255.
NAME_CHARACTERS = 255
SHARDS = 10_000

# config.json: a list of a million tensors and more is built from so many experts; 83,328 are published.
EXPERTS_OF_ALL_LAYERS = 200_000
_WIDTH = 1_000_000
CONFIG_FIELDS: dict[str, float] = {
    "num_hidden_layers": 1_000,
    "n_routed_experts": 10_000,
    "n_shared_experts": 1_000,
    "num_attention_heads": 10_000,
    "vocab_size": 10_000_000,
    "hidden_size": _WIDTH,
    "intermediate_size": _WIDTH,
    "moe_intermediate_size": _WIDTH,
    "q_lora_rank": _WIDTH,
    "kv_lora_rank": _WIDTH,
    "qk_nope_head_dim": _WIDTH,
    "qk_rope_head_dim": _WIDTH,
    "v_head_dim": _WIDTH,
    "max_position_embeddings": 1_000_000_000,
    "rope_theta": 1e12,
}
VISION_FIELDS: dict[str, float] = {
    "patch_size": 1_000,
    "hidden_size": 100_000,
    "num_attention_heads": 1_000,
    "num_hidden_layers": 1_000,
    "intermediate_size": _WIDTH,
    "pos_emb_height": 4_096,
    "pos_emb_width": 4_096,
    "pos_emb_time": 1_024,
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
