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

# Largest values of config.json's fields; the largest published ones follow.
LAYERS = 1_000  # 93
EXPERTS = 10_000  # 896
EXPERTS_OF_ALL_LAYERS = 200_000  # 83,328; a tensor list of a million and more is built from it
WIDTH = 1_000_000  # hidden, intermediate and latent sizes: 18,432
HEADS = 10_000  # 128
VOCABULARY = 10_000_000  # 163,840
POSITIONS = 1_000_000_000  # 262,144
ROPE_THETA = 1e12  # 50,000
