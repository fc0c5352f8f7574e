"""Which tensors the vision tower and projector of a checkpoint are: names (which carry no prefix), shapes, dtypes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from kimi_k2.checkpoint.names import expected_tensors
from kimi_k2.config import KimiK2Config
from kimi_k2.quantization.stored import TensorSpec

VISION = re.compile(r"^(vision_tower|mm_projector)\.")


def vision_tensors(config: KimiK2Config) -> Iterator[TensorSpec]:
    """Every tensor of the tower and the projector, in the order of the computation; none if there is no tower."""
    vision = config.vision
    if vision is None:
        return
    width, patch = vision.hidden_size, vision.patch_size

    def tensor(name: str, *shape: int) -> TensorSpec:
        return TensorSpec(name, torch.bfloat16, shape)

    def affine(name: str, rows: int, *columns: int) -> Iterator[TensorSpec]:
        yield tensor(f"{name}.weight", rows, *columns)
        yield tensor(f"{name}.bias", rows)

    yield from affine("vision_tower.patch_embed.proj", width, 3, patch, patch)
    yield tensor("vision_tower.patch_embed.pos_emb.weight", vision.pos_emb_height, vision.pos_emb_width, width)
    for layer in range(vision.num_hidden_layers):
        block = f"vision_tower.encoder.blocks.{layer}"
        yield from affine(f"{block}.norm0", width)
        yield from affine(f"{block}.wqkv", 3 * width, width)
        yield from affine(f"{block}.wo", width, width)
        yield from affine(f"{block}.norm1", width)
        yield from affine(f"{block}.mlp.fc0", vision.intermediate_size, width)
        yield from affine(f"{block}.mlp.fc1", width, vision.intermediate_size)
    yield from affine("vision_tower.encoder.final_layernorm", width)
    yield from affine("mm_projector.pre_norm", width)
    yield from affine("mm_projector.proj.0", vision.merged_size, vision.merged_size)
    yield from affine("mm_projector.proj.2", config.hidden_size, vision.merged_size)


def all_tensors(config: KimiK2Config) -> Iterator[TensorSpec]:
    """Every tensor of a checkpoint: the language model's (names without prefix), then the tower's."""
    yield from expected_tensors(config)
    yield from vision_tensors(config)


def stored_name(config: KimiK2Config, name: str) -> str:
    """A tensor's name in the files, with the prefix if it belongs to the language model."""
    return name if VISION.match(name) else config.tensor_prefix + name
