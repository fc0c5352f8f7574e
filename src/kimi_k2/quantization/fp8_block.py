"""FP8 e4m3 weights with one float32 scale for each 128x128 block, as DeepSeek-V3 and Kimi-K2 store them.

`weight_scale_inv` is named after the inverse of the scale used to quantize: dequantizing multiplies by it.
The last block of a row or column may be partial (kv_a_proj_with_mqa has 576 rows: 4.5 blocks).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from kimi_k2.config_fields import refuse_unknown
from kimi_k2.errors import ConfigError
from kimi_k2.quantization.draw import filled, scale_factors
from kimi_k2.quantization.modules import listed
from kimi_k2.quantization.rows import CHUNK_VALUES, is_finite, work_rows
from kimi_k2.quantization.stored import BlockSide, Shape, Stored, StoredFormat, register

E4M3_MAX = 448.0
_NAN = 0x7F
_SCALED = 256.0


def block_grid(shape: tuple[int, ...] | torch.Size, block_size: tuple[int, int]) -> tuple[int, int]:
    """Number of blocks (rows, columns) that cover the last two dimensions of `shape`."""
    (rows, columns), (block_rows, block_columns) = shape[-2:], block_size
    return -(-rows // block_rows), -(-columns // block_columns)


def expand_block_scale(scale: Tensor, shape: torch.Size, block_size: tuple[int, int]) -> Tensor:
    """Repeat block scales [..., R, C] to every element: [..., rows, columns], ragged edge cut off."""
    block_rows, block_columns = block_size
    expanded = scale.repeat_interleave(block_rows, dim=-2)[..., : shape[-2], :]
    return expanded.repeat_interleave(block_columns, dim=-1)[..., : shape[-1]]


def e4m3_to_float32(weight: Tensor) -> Tensor:
    """float32 values of an e4m3fn tensor of any shape; exact, NaN included."""
    if weight.device.type != "cpu":
        return weight.to(torch.float32)
    values = _halves(weight, torch.empty(weight.shape, dtype=torch.int16, device="cpu")).to(torch.float32)
    values.mul_(_SCALED)
    if not is_finite(weight):
        values.masked_fill_(weight.view(torch.uint8).bitwise_and(_NAN) == _NAN, torch.nan)
    return values


def scaled_e4m3_rows(weight: Tensor, scale: Tensor, use: int) -> Tensor:
    """float32 values of some rows on a CPU times `scale` [rows, 1], in scratch `use` (and the next).

    Another call overwrites them.
    """
    if not is_finite(weight):
        return e4m3_to_float32(weight).mul_(scale)
    halves = _halves(weight, work_rows(use, len(weight), weight, torch.int16))
    return torch.mul(halves, scale * _SCALED, out=work_rows(use + 1, len(weight), weight, torch.float32))


def _halves(weight: Tensor, wide: Tensor) -> Tensor:
    """float16 values over 256, exact, with 480 for NaN, in the memory of `wide`, int16 of the weight's shape.

    torch converts code by code, which takes ten times as long on a CPU. Exponent and mantissa of an e4m3 code, moved to
    the top of a float16's, read as the value times 2^-8, subnormals too, since both formats end the same way.
    """
    wide.copy_(weight.view(torch.int8))
    # Bit 14 is a copy of the sign, from the extension to 16 bits.
    wide.bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return wide.view(torch.float16)


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
    grid = (*weight.shape[:-2], *block_grid(weight.shape, block_size))
    if tuple(weight_scale_inv.shape) != grid:
        raise ValueError(f"weight_scale_inv: expected shape {list(grid)}, got {list(weight_scale_inv.shape)}")
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    flat, scales = weight.reshape(-1, rows, columns), weight_scale_inv.reshape(-1, *grid[-2:]).to(torch.float32)
    for matrix, scale, target in zip(flat, scales, out.view(-1, rows, columns), strict=True):
        for rows_here, plain in dequantized_chunks(matrix, scale, block_size):
            target[rows_here] = plain
    return out


def dequantized_chunks(
    weight: Tensor, weight_scale_inv: Tensor, block_size: tuple[int, int]
) -> Iterator[tuple[slice, Tensor]]:
    """Rows of a block-FP8 matrix [N, K], float32, as many at a time as a core's cache holds, with where they lie.

    The rows are the caller's until the next are asked for, which overwrite them.
    """
    rows, columns = weight.shape
    block_rows, block_columns = block_size
    # A device has no such cache to keep to, and nothing may be read back in the capture of a CUDA graph.
    if weight.device.type != "cpu":
        yield slice(0, rows), _dequantized(weight, weight_scale_inv, block_size)
        return
    # A power of two, so that the product is rounded as that of value and scale is.
    scales = (weight_scale_inv * _SCALED).repeat_interleave(block_columns, dim=1)[:, :columns]
    step = max(1, CHUNK_VALUES // columns)
    step = step // block_rows * block_rows if step > block_rows else step
    wide, scratch = (work_rows(i, min(step, rows), weight, d) for i, d in enumerate((torch.int16, torch.float32)))
    for start, end in _spans(rows, block_rows, step):
        rows_here = slice(start, end)
        blocks = slice(start // block_rows, -(-end // block_rows))
        if not is_finite(weight[rows_here]):
            yield rows_here, _dequantized(weight[rows_here], weight_scale_inv[blocks], block_size)
            continue
        halves, values = _halves(weight[rows_here], wide[: end - start]), scratch[: end - start]
        count = blocks.stop - blocks.start
        torch.mul(halves.unflatten(0, (count, -1)), scales[blocks].unsqueeze(1), out=values.unflatten(0, (count, -1)))
        yield rows_here, values


def _dequantized(weight: Tensor, weight_scale_inv: Tensor, block_size: tuple[int, int]) -> Tensor:
    """All at once, NaN included."""
    return e4m3_to_float32(weight) * expand_block_scale(weight_scale_inv, weight.shape, block_size)


def _spans(rows: int, block: int, step: int) -> Iterator[tuple[int, int]]:
    """Cuts of `rows`: of `step` whole blocks' rows, or parts of one block if `step` is less than a block."""
    whole = rows // block * block
    if step >= block:
        yield from ((first, min(first + step, whole)) for first in range(0, whole, step))
        if whole < rows:
            yield whole, rows
        return
    for start in range(0, rows, block):
        end = min(start + block, rows)
        yield from ((first, min(first + step, end)) for first in range(start, end, step))


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


@register
class Fp8BlockFormat(StoredFormat):
    """DeepSeek-style FP8: every Linear but lm_head and the router is e4m3 with one scale a block.

    `weight_block_size` is (output rows, input columns) of a block.
    """

    name = "fp8"
    method = "fp8"
    suffixes = ("weight", "weight_scale_inv")
    scales = ("weight_scale_inv",)

    rule = "transformers"

    quant_method: Literal["fp8"] = "fp8"
    fmt: Literal["e4m3"] = "e4m3"
    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    weight_block_size: tuple[BlockSide, BlockSide] = (128, 128)

    @classmethod
    def parse(cls, raw: Mapping[str, Any], field: str) -> Fp8BlockFormat:
        """Read Hugging Face's `fp8` method; vLLM calls `modules_to_not_convert` `ignored_layers` too."""
        own = ("quant_method", "fmt", "activation_scheme", "weight_block_size")
        refuse_unknown(raw, (*own, *_LISTS, "kv_cache_scheme"), field, only=_ONLY, harmless=("dequantize",))
        block = raw.get("weight_block_size")
        if not isinstance(block, (list, tuple)):
            raise ConfigError("expected a list of two block sizes", field=f"{field}.weight_block_size")
        fields = {name: raw[name] for name in own if name in raw}
        ignore = listed(raw, cls.rule, field, *_LISTS)
        return cls.model_validate({**fields, "weight_block_size": tuple(block), "ignore": ignore})

    def to_hf_dict(self) -> dict[str, Any]:
        """The content of `quantization_config` as Hugging Face writes it."""
        ignored = {"modules_to_not_convert": list(self.ignore)} if self.ignore else {}
        return self.model_dump(exclude={"ignore"}) | {"weight_block_size": list(self.weight_block_size)} | ignored

    def shapes(self, rows: int, columns: int) -> Iterable[Shape]:
        """FP8 values, and a float32 scale a block (the last of a row or column may be partial)."""
        return (torch.float8_e4m3fn, (rows, columns)), (torch.float32, block_grid((rows, columns), self.block))

    def dequantize(self, stored: Stored, dtype: torch.dtype) -> Tensor:
        """See `dequantize_fp8_block`."""
        return dequantize_fp8_block(stored["weight"], stored["weight_scale_inv"], self.block, dtype)

    def dequantized_rows(self, stored: Stored) -> Iterator[tuple[slice, Tensor]]:
        """See `dequantized_chunks`."""
        return dequantized_chunks(stored["weight"], stored["weight_scale_inv"].to(torch.float32), self.block)

    def quantize(self, weight: Tensor) -> Stored:
        """See `quantize_fp8_block`."""
        return dict(zip(self.suffixes, quantize_fp8_block(weight, self.block), strict=True))

    @property
    def e4m3_block(self) -> tuple[int, int]:
        """`weight_block_size`."""
        return self.weight_block_size

    def e4m3_blocks(self, stored: Stored) -> tuple[Tensor, Tensor]:
        """What is stored."""
        return stored["weight"], stored["weight_scale_inv"].to(torch.float32)

    def draw(
        self, suffix: str, rows: int, columns: int, std: float, generator: Callable[[str], torch.Generator]
    ) -> Tensor:
        """Gaussian FP8 values that just reach 448 in a block, and scales to match."""
        own = generator(suffix)
        if suffix == "weight":
            table = _gaussian_e4m3()
            values = filled(rows * columns, torch.uint8, lambda size: _draw_from(table, size, own))
            return values.view(torch.float8_e4m3fn).view(rows, columns)
        grid = block_grid((rows, columns), self.block)
        return scale_factors(math.prod(grid), std / (E4M3_MAX / _BLOCK_SIGMAS), own).view(grid)


_LISTS = ("modules_to_not_convert", "ignored_layers")
_ONLY = {"modules_to_convert": (None, []), "scale_fmt": (None, "float"), "expert_dtype": (None, "fp8")}

# The largest of 128 x 128 Gaussian values is typically 4.2 standard deviations out.
_BLOCK_SIGMAS = 4.2


@functools.cache
def _gaussian_e4m3() -> Tensor:
    """65536 FP8 values as bytes whose quantiles are a Gaussian's, scaled so that a 128x128 block just reaches 448."""
    quantiles = torch.special.ndtri((torch.arange(65536, dtype=torch.float64) + 0.5) / 65536)
    values = (quantiles * (E4M3_MAX / _BLOCK_SIGMAS)).clamp(-E4M3_MAX, E4M3_MAX)
    out: Tensor = values.to(torch.float8_e4m3fn).view(torch.uint8)
    return out


def _draw_from(table: Tensor, size: int, generator: torch.Generator) -> Tensor:
    # 64 random bits give four table indices; the generator is the slow part.
    words = torch.empty(-(-size // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
    indices = words.view(torch.int16)[:size].to(torch.int32) & 0xFFFF
    return table[indices]
