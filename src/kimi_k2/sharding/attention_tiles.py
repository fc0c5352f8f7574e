"""Attention's weights of MoE layers in the tiles that `nki.kernels.layers.decode_layers` reads.

In the model's float type they take the place of the ordinary ones: prefill computes with them too. In FP8 with the
checkpoint's blocks (values halved, scales doubled) decode reads them alone, and prefill the ordinary weights beside. A
scale belongs to a row and 128 columns of the stored matrix, or for w_uk, which is contracted over its rows, to 128 rows
and a column.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.quantization.neuron_e4m3 import halve_blocks
from kimi_k2.quantization.stored import Stored, format_of
from kimi_k2.sharding.experts import PARTITIONS
from kimi_k2.sharding.layout import AttentionTiles, Layout, PlannedTensor

NAME = "self_attn.tiles"
SOURCES = ("self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj")
# Queries' weights of all heads of a group of ranks that share a cache, one half of them for each core of LNC=2.
OF_GROUP = ("group_q_b", "group_w_uk")
CORES = 2
Cut = tuple[tuple[int, ...], int | None]  # a shape, and the dimension that ranks cut
# Of each tile's weight and scale the dimension that ranks cut.
_CUTS = {"q_b": (2, 1), "w_uk": (0, 0), "w_uv": (0, 0), "o": (1, 2)}


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
    layers = filter(config.is_moe_layer, range(config.num_hidden_layers))
    names = (f"model.layers.{layer}.{name}" for layer in layers for name in SOURCES)
    for name in names if kind == "fp8" else ():
        if format_of(config.quantization, name).e4m3_block != (PARTITIONS, PARTITIONS):
            raise ConfigError(f"fp8 needs FP8 blocks of 128 x 128, which {name} lacks", field="attention_tiles")


def shapes(config: KimiK2Config, ranks: int, group: int) -> dict[str, tuple[Cut, Cut]]:
    """Whole shapes of each tile's weight and scale by name, and their cuts.

    OF_GROUP's, with `group` ranks of one head each, are a core's part after the other, and not cut.
    """
    heads, p = config.num_attention_heads, PARTITIONS
    linears = (
        (heads * (p + config.qk_rope_head_dim), config.q_lora_rank),
        (heads * 2 * p, config.kv_lora_rank),
        (config.hidden_size, heads * p),
    )
    tiles, byte = Made(), torch.zeros(1, 1, dtype=torch.uint8, device="cpu")
    for name, (rows, columns) in zip(SOURCES, linears, strict=True):
        weight, scale = (byte.expand(rows, size) for size in (columns, columns // p))
        tiles |= _tiles_of(config, name, weight, scale, ranks, group)
    found: dict[str, tuple[Cut, Cut]] = {}
    for name, tile in tiles.items():
        weight_shape, scale_shape = (tuple(tensor.shape) for tensor in tile if tensor is not None)
        dims = _CUTS.get(name, (None, None))
        found[name] = (weight_shape, dims[0]), (scale_shape, dims[1])
    return found


def attention_tiles_tensors(
    config: KimiK2Config, layout: Layout, layer: int, tiles: dict[str, tuple[Cut, Cut]]
) -> Iterator[PlannedTensor]:
    """All tiles of a layer, of these `shapes`, and in FP8 their scales; OF_GROUP are each group's on all its ranks."""
    fp8, group = layout.attention_tiles(config) == "fp8", layout.query_group
    kinds = {"weight": torch.float8_e4m3fn, "scale": torch.float32} if fp8 else {"weight": layout.dtype}
    for name, cuts in tiles.items():
        parts = (group, config.num_attention_heads // group) if name in OF_GROUP else (layout.ranks, 1)
        for (suffix, dtype), (shape, dim) in zip(kinds.items(), cuts, strict=False):
            yield PlannedTensor(f"layers.{layer}.{NAME}.{name}.{suffix}", dtype, shape, layer, dim, 1, *parts)


def queries(normed: Tensor, q_b: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """q_b of float tiles: normed [.., q_lora_rank] to [.., heads, 128] without position and [.., heads, rope]."""
    in_order = normed.unflatten(-1, (-1, PARTITIONS)).mT.flatten(-2)
    both = in_order @ q_b.flatten(0, 1)
    plain, rotary = both.split([heads * PARTITIONS, q_b.shape[2] - heads * PARTITIONS], dim=-1)
    return plain.unflatten(-1, (heads, -1)), rotary.unflatten(-1, (heads, -1))


def up_projections(w_uk: Tensor, w_uv: Tensor) -> tuple[Tensor, Tensor]:
    """W_UK and W_UV of float tiles, [heads, 128, rank] both."""
    return w_uk.squeeze(2), w_uv.permute(0, 3, 2, 1).flatten(2)


def output(values: Tensor, o_proj: Tensor) -> Tensor:
    """o_proj of float tiles: [.., heads * 128] to a rank's part of [.., H]."""
    by_row: Tensor = values.unflatten(-1, (o_proj.shape[1], -1)).mT.flatten(-2)
    return by_row @ o_proj.flatten(0, 1)


def make_tiles(config: KimiK2Config, layout: Layout, module: str, stored: Stored) -> dict[str, Tensor]:
    """Tiles and scales, by name and suffix, of one of SOURCES.

    Args:
        config: of the model.
        layout: ranks that divide the heads (the rows of q_b lie in their order) or share a cache, and formats.
        module: the stored linear's name.
        stored: its tensors.
    """
    source, ranks, group = format_of(config.quantization, module), layout.ranks, layout.query_group
    scale: Tensor | None = None
    if layout.attention_tiles(config) == "fp8":
        blocks = source.e4m3_blocks(stored)
        assert blocks is not None
        sides = (PARTITIONS, PARTITIONS)
        weight, grid, _ = halve_blocks(*blocks, sides, sides)
        scale = grid.repeat_interleave(PARTITIONS, 0)[: len(weight)]
    else:
        weight = source.dequantize(stored, layout.dtype)
    bits = weight.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[weight.dtype.itemsize])
    by_name: dict[str, Tensor] = {}
    for name, (tile, factors) in _tiles_of(config, module, bits, scale, ranks, group).items():
        by_name[f"{name}.weight"] = tile.contiguous().view(weight.dtype)
        if factors is not None:
            by_name[f"{name}.scale"] = factors.contiguous()
    return by_name


def of_each_rank(tile: Tensor, group: int) -> Tensor:
    """One of OF_GROUP's once for each rank of a group, in their order."""
    copies = tile.unflatten(0, (-1, CORES)).view(torch.uint8 if tile.dtype.itemsize == 1 else tile.dtype)
    repeated: Tensor = copies.repeat_interleave(group, dim=0).flatten(0, 1).view(tile.dtype)
    return repeated


Made = dict[str, tuple[Tensor, Tensor | None]]


def _tiles_of(config: KimiK2Config, module: str, weight: Tensor, scale: Tensor | None, ranks: int, group: int) -> Made:
    """Tiles and scales by name, as views; scale [rows, columns / 128]."""
    make = _q_b if module.endswith("q_b_proj") else _kv_b if module.endswith("kv_b_proj") else _o
    tiles = make(config, weight, scale, ranks)
    if group and make is not _o:
        tiles |= _of_group(config, make(config, weight, scale, config.num_attention_heads * CORES // group), group)
    return tiles


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


def _of_group(config: KimiK2Config, tiles: Made, group: int) -> Made:
    """OF_GROUP's of q_b or W_UK, made for as many ranks as there are cores' halves of groups."""
    halves = config.num_attention_heads * CORES // group

    def apart(tile: Tensor, dim: int) -> Tensor:
        halves_first: Tensor = tile.unflatten(dim, (halves, -1)).movedim(dim, 0)
        return halves_first

    name, dims = ("q_b", (2, 1)) if "q_b" in tiles else ("w_uk", (0, 0))
    tile, scale = tiles[name]
    return {f"group_{name}": (apart(tile, dims[0]), None if scale is None else apart(scale, dims[1]))}


def _o(config: KimiK2Config, weight: Tensor, scale: Tensor | None, _: int) -> Made:
    p = PARTITIONS
    factors = None if scale is None else scale.unflatten(0, (-1, p)).transpose(0, 1)
    return {"o": (weight.unflatten(1, (config.num_attention_heads, p)).permute(2, 1, 0), factors)}
