"""Attention's weights in the tiles that `nki.kernels.attention.attention_decode` reads.

In the model's float type they take the place of the ordinary ones: prefill computes with them too. In FP8 with the
checkpoint's blocks (values halved, scales doubled) decode reads them alone, and prefill the ordinary weights beside. A
scale belongs to a row and 128 columns of the stored matrix, or for w_uk,
which is contracted over its rows, to 128 rows and a column.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.quantization.neuron_e4m3 import halve_blocks
from kimi_k2.quantization.stored import Stored, StoredFormat
from kimi_k2.sharding.experts.tiled import PARTITIONS
from kimi_k2.sharding.layout import AttentionTiles
from kimi_k2.sharding.planned import PlannedTensor

NAME = "self_attn.tiles"
SOURCES = ("self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj")
Cut = tuple[tuple[int, ...], int]  # a shape, and the dimension that ranks cut


def in_place_of_linears(kind: str) -> bool:
    """Whether tiles of this format are all that is held of q_b_proj, kv_b_proj and o_proj."""
    return kind == "bf16"


def check_sizes(config: KimiK2Config) -> None:
    """Refuse sizes that the kernel does not take.

    Raises:
        ConfigError: naming the field.
    """
    for field in ("qk_nope_head_dim", "v_head_dim"):
        if getattr(config, field) != PARTITIONS:
            raise ConfigError(f"attention tiles hold {PARTITIONS}, got {getattr(config, field)}", field=field)
    for field in ("q_lora_rank", "kv_lora_rank", "hidden_size"):
        if getattr(config, field) % PARTITIONS:
            expected = f"a multiple of {PARTITIONS}"
            raise ConfigError(f"attention tiles hold {expected}, got {getattr(config, field)}", field=field)


def check_stored(config: KimiK2Config, kind: AttentionTiles) -> None:
    """Refuse FP8 tiles of a checkpoint whose attention has no blocks of 128 x 128.

    Raises:
        ConfigError: it has none.
    """
    held = config.quantization
    in_blocks = held is not None and held.e4m3_block == (PARTITIONS, PARTITIONS)
    if kind == "fp8" and not in_blocks:
        raise ConfigError("fp8 needs a checkpoint in FP8 blocks of 128 x 128", field="attention_tiles")


def shapes(config: KimiK2Config, ranks: int) -> dict[str, tuple[Cut, Cut]]:
    """Whole shapes of each tile's weight and scale, by name."""
    heads, rope, rank = config.num_attention_heads, config.qk_rope_head_dim, config.kv_lora_rank
    own = heads // ranks
    chunks, latents = config.q_lora_rank // PARTITIONS, rank // PARTITIONS
    groups = ranks * (own + -(-own * rope // PARTITIONS))
    p, hidden = PARTITIONS, config.hidden_size
    return {
        "q_b": (((p, chunks, heads * (p + rope)), 2), ((p, groups, chunks), 1)),
        "w_uk": (((heads, p, 1, rank), 0), ((heads, p, latents, 1), 0)),
        "w_uv": (((heads, p, latents, p), 0), ((heads, p, 1, latents), 0)),
        "o": (((p, heads, hidden), 1), ((p, hidden // p, heads), 2)),
    }


def attention_tiles_tensors(
    config: KimiK2Config, root: str, layer: int, ranks: int, kind: AttentionTiles, dtype: torch.dtype
) -> Iterator[PlannedTensor]:
    """All tiles of a layer and, in FP8, their scales."""
    for name, ((shape, dim), scale) in shapes(config, ranks).items():
        held = torch.float8_e4m3fn if kind == "fp8" else dtype
        yield PlannedTensor(f"{root}.{NAME}.{name}.weight", held, shape, layer, dim, 1, ranks)
        if kind == "fp8":
            shape, dim = scale
            yield PlannedTensor(f"{root}.{NAME}.{name}.scale", torch.float32, shape, layer, dim, 1, ranks)


def make_tiles(
    config: KimiK2Config,
    module: str,
    stored: Stored,
    source: StoredFormat,
    ranks: int,
    kind: AttentionTiles,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Tiles and scales, by name and suffix, of one of SOURCES.

    Args:
        config: of the model.
        module: the stored linear's name.
        stored: its tensors.
        source: their format.
        ranks: that divide the heads; the rows of q_b lie in their order.
        kind: what the tiles are held in.
        dtype: of float tiles.
    """
    scale: Tensor | None = None
    if kind == "fp8":
        blocks = source.e4m3_blocks(stored)
        assert blocks is not None
        sides = (PARTITIONS, PARTITIONS)
        weight, grid, _ = halve_blocks(*blocks, sides, sides, allow_nan=True)
        scale = grid.repeat_interleave(PARTITIONS, 0)[: len(weight)]
    else:
        weight = source.dequantize(stored, dtype)
    bits = weight.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[weight.dtype.itemsize])
    make = _q_b if module.endswith("q_b_proj") else _kv_b if module.endswith("kv_b_proj") else _o
    made: dict[str, Tensor] = {}
    for name, (tile, factors) in make(config, bits, scale, ranks).items():
        made[f"{name}.weight"] = tile.contiguous().view(weight.dtype)
        if factors is not None:
            made[f"{name}.scale"] = factors.contiguous()
    return made


Made = dict[str, tuple[Tensor, Tensor | None]]


def _q_b(config: KimiK2Config, weight: Tensor, scale: Tensor | None, ranks: int) -> Made:
    """Of each rank first the rows without position of its heads, then each head's rotary rows."""
    p, rope = PARTITIONS, config.qk_rope_head_dim

    def sections(rows: Tensor) -> tuple[Tensor, Tensor]:
        by_head = rows.unflatten(0, (ranks, -1, p + rope))
        return by_head[:, :, :p].flatten(1, 2), by_head[:, :, p:].flatten(1, 2)

    rows = torch.cat(sections(weight), dim=1).flatten(0, 1)
    tile = rows.unflatten(1, (-1, p)).permute(2, 1, 0)
    if scale is None:
        return {"q_b": (tile, None)}
    plain, rotary = sections(scale)  # [ranks, rows, chunks]
    rotary = torch.nn.functional.pad(rotary, (0, 0, 0, -rotary.shape[1] % p))
    groups = torch.cat((plain, rotary), dim=1).unflatten(1, (-1, p)).flatten(0, 1)
    return {"q_b": (tile, groups.transpose(0, 1))}


def _kv_b(config: KimiK2Config, weight: Tensor, scale: Tensor | None, _: int) -> Made:
    p, heads = PARTITIONS, config.num_attention_heads
    w_uk, w_uv = weight.unflatten(0, (heads, 2, p)).unbind(1)  # [heads, 128, rank]
    uk_scale = uv_scale = None
    if scale is not None:
        of_keys, of_values = scale.unflatten(0, (heads, 2, p)).unbind(1)  # [heads, 128, rank / 128]
        # 128 rows share a block.
        uk_scale = of_keys[:, :1].expand(heads, p, -1).unsqueeze(3)
        uv_scale = of_values.unsqueeze(2)
    return {
        "w_uk": (w_uk.unsqueeze(2), uk_scale),
        "w_uv": (w_uv.unflatten(2, (-1, p)).permute(0, 3, 2, 1), uv_scale),
    }


def _o(config: KimiK2Config, weight: Tensor, scale: Tensor | None, _: int) -> Made:
    p = PARTITIONS
    factors = None if scale is None else scale.unflatten(0, (-1, p)).transpose(0, 1)
    return {"o": (weight.unflatten(1, (config.num_attention_heads, p)).permute(2, 1, 0), factors)}
