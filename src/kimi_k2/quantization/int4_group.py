"""Symmetric INT4 weights in groups along the input dimension, in compressed-tensors' `pack-quantized` layout.

Eight values share an int32, the least significant nibble first, each stored as value + 8. There is no zero point.
"""

from __future__ import annotations

import torch
from torch import Tensor

VALUES_PER_WORD = 8
OFFSET = 8
MAX_VALUE = 7  # symmetric: -8 is representable but a symmetric quantizer leaves it unused


def pack_int4(values: Tensor) -> Tensor:
    """Pack integers in -8..7, int8 [..., N, K], to int32 [..., N, ceil(K / 8)]; spare nibbles are 0 bits."""
    nibbles = (values + OFFSET).view(torch.uint8)
    nibbles = torch.nn.functional.pad(nibbles, (0, -values.shape[-1] % VALUES_PER_WORD))
    # Two values a byte, then the bytes are reread as little-endian words.
    return (nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)).contiguous().view(torch.int32)


def unpack_int4(weight_packed: Tensor, columns: int) -> Tensor:
    """Unpack int32 [..., N, ceil(K / 8)] to int8 [..., N, K] with K = `columns`, values in -8..7.

    Raises:
        ValueError: `weight_packed` is not int32 or has another number of words.
    """
    if weight_packed.dtype != torch.int32:
        raise ValueError(f"weight_packed: expected int32, got {weight_packed.dtype}")
    if weight_packed.shape[-1] != -(-columns // VALUES_PER_WORD):
        raise ValueError(
            f"weight_packed: expected {-(-columns // VALUES_PER_WORD)} words for {columns} columns, "
            f"got {weight_packed.shape[-1]}"
        )
    packed = weight_packed.contiguous().view(torch.uint8)
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)[..., :columns]
    return nibbles.view(torch.int8) - OFFSET


def dequantize_int4_group(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_shape: Tensor | tuple[int, int],
    group_size: int = 32,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Unpack and multiply every group by its scale.

    Args:
        weight_packed: int32 [..., N, ceil(K / 8)].
        weight_scale: bfloat16 or float32 [..., N, K / group_size].
        weight_shape: (N, K), as a tuple or the checkpoint's int32 tensor of two elements.
        group_size: input columns that share a scale.
        dtype: of the result; the product is formed in float32 and rounded once.

    Returns:
        [..., N, K] in `dtype`.

    Raises:
        ValueError: a shape or dtype disagrees with `weight_shape`.
    """
    rows, columns = (int(size) for size in weight_shape)
    if weight_packed.shape[-2] != rows:
        raise ValueError(f"weight_packed: expected {rows} rows (weight_shape), got {weight_packed.shape[-2]}")
    if columns % group_size or weight_scale.shape[-2:] != (rows, columns // group_size):
        raise ValueError(
            f"weight_scale: expected [..., {rows}, {columns} / {group_size}], got {list(weight_scale.shape)}"
        )
    values = unpack_int4(weight_packed, columns).to(torch.float32).unflatten(-1, (-1, group_size))
    values *= weight_scale.to(torch.float32).unsqueeze(-1)
    return values.flatten(-2).to(dtype)


def quantize_int4_group(
    weight: Tensor, group_size: int = 32, scale_dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize symmetrically with scale = amax / 7 a group, rounded to `scale_dtype` before it is used.

    Args:
        weight: floating [..., N, K], K a multiple of `group_size`.

    Returns:
        (weight_packed int32 [..., N, K / 8], weight_scale [..., N, K / group_size], weight_shape int32 [2]).
    """
    rows, columns = weight.shape[-2:]
    if columns % group_size:
        raise ValueError(f"weight: expected a multiple of {group_size} columns, got {columns}")
    groups = weight.to(torch.float32).unflatten(-1, (-1, group_size))
    amax = groups.abs().amax(dim=-1)
    scale = torch.where(amax > 0, amax / MAX_VALUE, torch.ones_like(amax)).to(scale_dtype)
    values = (groups / scale.to(torch.float32).unsqueeze(-1)).round_().clamp_(-MAX_VALUE, MAX_VALUE)
    packed = pack_int4(values.to(torch.int8).flatten(-2))
    return packed, scale, torch.tensor([rows, columns], dtype=torch.int32)
