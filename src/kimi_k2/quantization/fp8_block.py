"""FP8 e4m3 weights with one float32 scale for each 128x128 block, as DeepSeek-V3 and Kimi-K2 store them.

`weight_scale_inv` is named after the inverse of the scale used to quantize: dequantizing multiplies by it.
The last block of a row or column may be partial (kv_a_proj_with_mqa has 576 rows: 4.5 blocks).
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0


def block_grid(shape: tuple[int, ...] | torch.Size, block_size: tuple[int, int]) -> tuple[int, int]:
    """Number of blocks (rows, columns) that cover the last two dimensions of `shape`."""
    (rows, columns), (block_rows, block_columns) = shape[-2:], block_size
    return -(-rows // block_rows), -(-columns // block_columns)


def expand_block_scale(scale: Tensor, shape: torch.Size, block_size: tuple[int, int]) -> Tensor:
    """Repeat block scales [..., R, C] to every element: [..., rows, columns], ragged edge cut off."""
    block_rows, block_columns = block_size
    expanded = scale.repeat_interleave(block_rows, dim=-2)[..., : shape[-2], :]
    return expanded.repeat_interleave(block_columns, dim=-1)[..., : shape[-1]]


def dequantize_fp8_block(
    weight: Tensor,
    weight_scale_inv: Tensor,
    block_size: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Multiply every block by its scale.

    Args:
        weight: float8_e4m3fn [..., N, K].
        weight_scale_inv: float32 [..., ceil(N / block rows), ceil(K / block columns)].
        block_size: (rows, columns) of a block.
        dtype: of the result; the product is formed in float32 and rounded once.

    Returns:
        [..., N, K] in `dtype`.

    Raises:
        ValueError: the scale's shape is not the block grid of the weight.
    """
    rows, columns = weight.shape[-2:]
    block_rows, block_columns = block_size
    grid = (*weight.shape[:-2], *block_grid(weight.shape, block_size))
    if tuple(weight_scale_inv.shape) != grid:
        raise ValueError(f"weight_scale_inv: expected shape {list(grid)}, got {list(weight_scale_inv.shape)}")
    scale = weight_scale_inv.to(torch.float32)
    if rows % block_rows == 0 and columns % block_columns == 0:
        # Broadcasting over a block view spares the expanded scale, which is as large as the weight.
        blocks = weight.to(torch.float32).unflatten(-1, (-1, block_columns)).unflatten(-3, (-1, block_rows))
        blocks *= scale[..., :, None, :, None]
        return blocks.flatten(-4, -3).flatten(-2, -1).to(dtype)
    return (weight.to(torch.float32) * expand_block_scale(scale, weight.shape, block_size)).to(dtype)


def quantize_fp8_block(weight: Tensor, block_size: tuple[int, int] = (128, 128)) -> tuple[Tensor, Tensor]:
    """Quantize to e4m3 with scale = amax / 448 a block; a block of zeros gets scale 1.

    Args:
        weight: floating [..., N, K].
        block_size: (rows, columns) of a block.

    Returns:
        (float8_e4m3fn [..., N, K], float32 scale [..., ceil(N / rows), ceil(K / columns)]).
    """
    rows, columns = weight.shape[-2:]
    block_rows, block_columns = block_size
    grid_rows, grid_columns = block_grid(weight.shape, block_size)
    padded = torch.nn.functional.pad(
        weight.to(torch.float32),
        (0, grid_columns * block_columns - columns, 0, grid_rows * block_rows - rows),
    )
    blocks = padded.unflatten(-1, (grid_columns, block_columns)).unflatten(-3, (grid_rows, block_rows))
    amax = blocks.abs().amax(dim=(-3, -1))
    scale = torch.where(amax > 0, amax / E4M3_MAX, torch.ones_like(amax))
    quantized = (blocks / scale[..., :, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return quantized.flatten(-4, -3).flatten(-2, -1)[..., :rows, :columns].contiguous(), scale
