"""Stored forms of a weight (FP8 blocks, FP8 a channel, INT4 groups, BF16) and held ones of the routed experts.

Trainium2 reads e4m3 with a maximum of 240: codes whose exponent bits are all ones (256 to 448) are NaN there. Half of
every value and twice the scale is the same weight, at most 224, exact but for the odd multiples of 2^-9 below 2^-5,
which round to even.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BLOCKWISE, CHANNELWISE = "blockwise_symmetric", "expert_wise_per_channel_symmetric"  # NxD's names
NEURON_E4M3_MAX = 240.0
DEFAULT_BLOCK = 128  # of experts that the checkpoint does not store in blocks
E4M3 = torch.float8_e4m3fn
Stored = dict[str, Tensor]  # a weight's tensors by suffix

_FP8 = {"quant_method", "fmt", "activation_scheme", "weight_block_size", "scale_fmt", "modules_to_not_convert"}
_COMPRESSED = {
    "quant_method", "format", "config_groups", "ignore", "kv_cache_scheme", "quantization_status", "version",
    "global_compression_ratio", "sparsity_config", "transform_config", "run_compressed",
}  # fmt: skip


class ConfigError(ValueError):
    """An option or field that is not followed; `field` is its name."""

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


def require(condition: bool, field: str, message: str) -> None:
    """Raise ConfigError unless `condition`."""
    if not condition:
        raise ConfigError(message, field=field)


@dataclass(frozen=True)
class StoredForm:
    """What a checkpoint's `quantization_config` says of its quantized weights; others are floats.

    Attributes:
        block: rows and columns that share an FP8 scale; (1, 0) is a row, an output channel. None without FP8.
        group: columns that share an INT4 scale; 0 without INT4.
    """

    block: tuple[int, int] | None = None
    group: int = 0


def stored_form(config: Mapping[str, Any] | None) -> StoredForm:
    """Read a `quantization_config`.

    Raises:
        ConfigError: a form or member that is not read here.
    """
    if config is None:
        return StoredForm()
    where = "quantization_config"
    method = config.get("quant_method", "compressed-tensors")
    require(method in ("fp8", "compressed-tensors"), f"{where}.quant_method", f"expected fp8, got {method!r}")
    for name in config:
        known = name in (_FP8 if method == "fp8" else _COMPRESSED)
        require(known, f"{where}.{name}", "not known, so it may change what the model computes")
    if method == "fp8":
        block = config.get("weight_block_size")
        if not isinstance(block, (list, tuple)) or len(block) != 2:
            raise ConfigError(f"expected two sizes, got {block!r}", field=f"{where}.weight_block_size")
        return StoredForm(block=(block[0], block[1]))
    for name in ("sparsity_config", "transform_config", "kv_cache_scheme"):
        require(not config.get(name), f"{where}.{name}", f"expected none, got {config.get(name)!r}")
    groups = list(config.get("config_groups", {}).values())
    require(len(groups) == 1, f"{where}.config_groups", f"expected one group, got {len(groups)}")
    weights = groups[0]["weights"]
    kind = tuple(weights.get(name) for name in ("type", "num_bits", "strategy", "symmetric"))
    require(not weights.get("actorder"), f"{where}.actorder", f"expected none, got {weights.get('actorder')!r}")
    if kind == ("int", 4, "group", True):
        group = weights.get("group_size")
        require(type(group) is int and group > 0, f"{where}.group_size", f"got {group!r}")
        return StoredForm(group=group)
    if kind == ("float", 8, "channel", True):
        return StoredForm(block=(1, 0))
    require(kind == ("float", 8, "block", True), f"{where}.config_groups", f"INT4 groups or FP8 are read, got {kind}")
    return StoredForm(block=tuple(weights["block_structure"]))


def held_block(form: StoredForm, hidden: int, width: int) -> int:
    """Side of the blocks in which the routed experts are held.

    It divides the checkpoint's block, so that scales are repeated and not computed anew, and a rank's `width` columns
    of an expert (64 at moe_tp 32), so that no block crosses the border of a rank.
    """
    stored = form.block if form.block and form.block[1] else (DEFAULT_BLOCK, DEFAULT_BLOCK)
    return math.gcd(*stored, hidden, width)


def dequantized(stored: Stored, form: StoredForm) -> Tensor:
    """The float32 weight [N, K] of a weight's tensors by suffix.

    Raises:
        ValueError: shapes disagree with the form.
    """
    if "weight_packed" in stored:
        return _from_int4(stored["weight_packed"], stored["weight_scale"], stored["weight_shape"], form.group)
    weight = stored["weight"]
    if weight.dtype != E4M3:
        return weight.to(torch.float32)
    scale, block = fp8_scale(stored, form)
    return weight.to(torch.float32).mul_(expanded(scale, weight.shape, block))


def fp8_scale(stored: Stored, form: StoredForm) -> tuple[Tensor, tuple[int, int]]:
    """The scale of an FP8 weight, under either of its names, and the rows and columns that share one.

    Raises:
        ValueError: there is none, or it has not the form's shape.
    """
    weight, scale = stored["weight"], stored.get("weight_scale_inv", stored.get("weight_scale"))
    rows, columns = form.block or (0, 0)
    columns = columns or weight.shape[1]
    grid = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns)) if rows else None
    if scale is None or tuple(scale.shape) != grid:
        found = None if scale is None else list(scale.shape)
        raise ValueError(f"FP8 {list(weight.shape)} with scale {found}, expected {grid} by quantization_config")
    return scale, (rows, columns)


def expanded(scale: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """A scale a block as float32 of every value of a [N, K] weight; the last blocks may be part empty."""
    rows = scale.to(torch.float32).repeat_interleave(block[0], dim=0)[: shape[0]]
    return rows.repeat_interleave(block[1], dim=1)[:, : shape[1]]


def _from_int4(packed: Tensor, scale: Tensor, shape: Tensor, group: int) -> Tensor:
    """compressed-tensors' pack-quantized: eight values + 8 an int32, the least significant nibble first."""
    rows, columns = (int(size) for size in shape)
    if not group or packed.shape != (rows, -(-columns // 8)) or scale.shape != (rows, -(-columns // group)):
        raise ValueError(f"INT4 {list(packed.shape)} with scale {list(scale.shape)} of a weight [{rows}, {columns}]")
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    values = ((packed.unsqueeze(-1) >> shifts) & 0xF).flatten(1)[:, :columns].to(torch.float32) - 8
    return values.mul_(expanded(scale, values.shape, (1, group)))


def held(stored: Stored, form: StoredForm, neuron_config: Any) -> dict[str, Tensor]:
    """A routed expert's projection [N, K] as it is held: `weight`, and of FP8 its float32 `scale`.

    In blocks the scale is [N / side, K / side], a channel [N, 1].
    """
    if not neuron_config.quantized:
        return {"weight": dequantized(stored, form).to(neuron_config.torch_dtype)}
    if neuron_config.quantization_type == CHANNELWISE:
        return _quantized(dequantized(stored, form), 1, 0)
    side = neuron_config.quantization_block_size[0]
    weight = stored.get("weight")
    if weight is not None and weight.dtype == E4M3 and form.block and form.block[1]:
        scale, block = fp8_scale(stored, form)
        repeats = (block[0] // side, block[1] // side)
        grid = torch.Size((weight.shape[0] // side, weight.shape[1] // side))
        return {"weight": (weight.to(torch.float32) * 0.5).to(E4M3), "scale": expanded(scale * 2.0, grid, repeats)}
    return _quantized(dequantized(stored, form), side, side)


def _quantized(weight: Tensor, rows: int, columns: int) -> dict[str, Tensor]:
    """FP8 with a scale of amax / 240 for `rows` x `columns` values (0: all of a row)."""
    blocks = weight.unflatten(1, (-1, columns or weight.shape[1])).unflatten(0, (-1, rows))
    scale = blocks.abs().amax(dim=(1, 3)) / NEURON_E4M3_MAX
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return {"weight": (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1).to(E4M3), "scale": scale}
