"""Order of four-bit expert weights in memory for `kimi_k2::moe_w4a16`: each thread's words next to each other.

A chunk is 256 rows by 128 columns (16 KB of words, and their scales). The layout is a permutation of the checkpoint's
nibbles and scales: shapes, dtypes and bytes stay the same, and `checkpoint_order` undoes it bit for bit.

Rows are cut into blocks of 4 tiles of 4 warps of 16 rows: in gate_up_proj the 16 are 8 gate rows and the same 8 up
rows; in down_proj row 4a + 2h + b of 16 is row 2a + b of half h. Columns are cut into chunks of 2 x 4 steps of
2 x 4 x 2 (half, thread of four, pair). csrc/w4a16.cuh says what the kernel does with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.quantization.int4_group import dequantize_int4_group, pack_nibbles, unpack_nibbles

GROUP = 32
CHUNK_ROWS, CHUNK_COLUMNS = 256, 128


class FourBits(NamedTuple):
    """What the kernels are instances of (csrc/w4a16_formats.cuh).

    Attributes:
        library: of the launches for more than a few tokens.
        group: columns that share a scale.
        scale: the scales' dtype; e8m0 is uint8.
    """

    library: str
    group: int
    scale: torch.dtype


# By their numbers in csrc/w4a16_decode.cu: INT4, MXFP4, NVFP4 and INT4 in wider groups.
FORMATS = (
    FourBits("experts/w4a16", GROUP, torch.bfloat16),
    FourBits("experts/w4a16_mxfp4", 32, torch.uint8),
    FourBits("experts/w4a16_nvfp4", 16, torch.float8_e4m3fn),
    FourBits("experts/w4a16_group64", 64, torch.bfloat16),
    FourBits("experts/w4a16_group128", 128, torch.bfloat16),
)
INT4 = FORMATS[0]


def format_of(packed: Tensor, scale: Tensor) -> FourBits:
    """The format of words int32 [..., K/8] and scales [..., K/group].

    Raises:
        KernelError: there is no such format.
    """
    columns = packed.shape[-1] * 8
    for one in FORMATS:
        if scale.dtype == one.scale and scale.shape[-1] * one.group == columns:
            return one
    known = ", ".join(f"{one.scale} a {one.group}" for one in FORMATS)
    raise KernelError(
        f"gate_up_proj_scale is {scale.dtype} {tuple(scale.shape)} of {columns} columns, expected {known}"
    )


class PreparedW4A16(NamedTuple):
    """Weights in the kernel's order; shapes as in the checkpoint's stacked tensors.

    `down_proj_packed` is bfloat16 [E, H, I] and `down_proj_scale` None in the mixed mode.
    """

    gate_up_proj_packed: Tensor
    gate_up_proj_scale: Tensor
    down_proj_packed: Tensor
    down_proj_scale: Tensor | None


def _split_rows(matrix: Tensor, gate_up: bool) -> Tensor:
    """[rows, columns] to [block, tile 4, warp 4, half 2, row 8, columns]."""
    if gate_up:
        return matrix.unflatten(0, (2, -1, 4, 4, 8)).permute(1, 2, 3, 0, 4, 5)
    return matrix.unflatten(0, (-1, 4, 4, 4, 2, 2)).permute(0, 1, 2, 4, 3, 5, 6).flatten(4, 5)


# Axes after both splits: block, tile, warp, half row, row, chunk, column half, step, half step, thread, pair.
# In memory: block, chunk, tile, column half, warp, row, thread, step, then within a word pair, half step, half row.
_WORDS = (0, 5, 1, 6, 2, 4, 9, 7, 10, 8, 3)
# A step of bf16 weights stands where a column half does, and its register and pair where a word does.
_BF16 = (0, 5, 1, 6, 2, 4, 8, 7, 3, 9)
# Axes: block, tile, warp, half row, row, chunk, group. In memory: block, chunk, tile, warp, row, group, half row.
_SCALES = (0, 5, 1, 2, 4, 6, 3)


class _Order(NamedTuple):
    """How one kind of a matrix's values lie in the kernel's order.

    Attributes:
        columns: that a chunk's are cut into.
        axes: in memory.
    """

    columns: tuple[int, ...]
    axes: tuple[int, ...]

    def put(self, values: Tensor, gate_up: bool) -> Tensor:
        """Values [rows, columns] of the checkpoint."""
        split = _split_rows(values, gate_up).unflatten(-1, (-1, *self.columns))
        return split.permute(self.axes).reshape(values.shape)

    def back(self, ordered: Tensor, gate_up: bool) -> Tensor:
        """Undo `put`."""
        places = self.put(torch.arange(ordered.numel(), device=ordered.device).view(ordered.shape), gate_up)
        return (
            torch.empty_like(ordered).view(-1).index_copy_(0, places.view(-1), ordered.reshape(-1)).view(ordered.shape)
        )


_NIBBLES, _DENSE = _Order((2, 4, 2, 4, 2), _WORDS), _Order((2, 2, 4, 2), _BF16)


def _scales(groups: int) -> _Order:
    """`groups`: of a chunk."""
    return _Order((groups,), _SCALES)


def _put_words(packed: Tensor, gate_up: bool) -> Tensor:
    return pack_nibbles(_NIBBLES.put(unpack_nibbles(packed), gate_up)).contiguous().view(torch.int32)


def _words_back(ordered: Tensor, gate_up: bool) -> Tensor:
    return pack_nibbles(_NIBBLES.back(unpack_nibbles(ordered), gate_up)).contiguous().view(torch.int32)


def checkpoint_order(stored: dict[str, Tensor], gate_up: bool) -> dict[str, Tensor]:
    """One expert's projection from the kernel's order, by suffix: BF16 `weight`, or packed values and scales."""
    name = "weight_packed" if "weight_packed" in stored else "weight"
    if stored[name].dtype == torch.bfloat16:
        return {name: _DENSE.back(stored[name], False)}
    words, scale = stored[name].view(torch.int32), stored["weight_scale"]
    scales = _scales(CHUNK_COLUMNS // format_of(words, scale).group)
    return stored | {
        name: _words_back(words, gate_up).view(stored[name].dtype),
        "weight_scale": scales.back(_bits(scale), gate_up).view(scale.dtype),
    }


def _checked(name: str, tensor: Tensor, dtype: torch.dtype, rows: int, columns: int) -> None:
    if tensor.dim() != 3 or tensor.dtype != dtype or tensor.shape[1] % rows or tensor.shape[2] % columns:
        shape = f"[E, multiple of {rows}, multiple of {columns}]"
        raise KernelError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}")


def _bits(scale: Tensor) -> Tensor:
    """Scales in a dtype that PyTorch moves around."""
    return scale.view(torch.uint8) if scale.dtype == torch.float8_e4m3fn else scale


def _each(function: Callable[[Tensor, bool], Tensor], tensor: Tensor, gate_up: bool, in_place: bool = False) -> Tensor:
    """One expert at a time: the temporaries are several times an expert's weights."""
    made = tensor if in_place else torch.empty_like(tensor)
    for source, target in zip(_bits(tensor), _bits(made), strict=True):
        target.copy_(function(source, gate_up))
    return made


def prepare_w4a16(
    gate_up_proj_packed: Tensor,
    gate_up_proj_scale: Tensor,
    down_proj_packed: Tensor,
    down_proj_scale: Tensor | None,
    *,
    w2_bf16: bool = False,
    in_place: bool = False,
) -> PreparedW4A16:
    """Checkpoint order to kernel order, once at load.

    Args:
        gate_up_proj_packed: int32 [E, 2I, H/8], gate rows first; H a multiple of 256, I of 128.
        gate_up_proj_scale: [E, 2I, H/group] as one of `FORMATS` has it.
        down_proj_packed: int32 [E, H, I/8]; or, where the checkpoint keeps it unquantized, bfloat16 [E, H, I].
        down_proj_scale: [E, H, I/group]; None with bfloat16 weights.
        w2_bf16: keep the second stage in bfloat16: packed weights are dequantized and rounded once.
        in_place: the arguments take the new order; nothing is held twice. Not with `w2_bf16` of packed weights.

    Raises:
        KernelError: a shape or dtype that the kernel does not take.
    """
    _checked("gate_up_proj_packed", gate_up_proj_packed, torch.int32, CHUNK_ROWS, 2 * CHUNK_COLUMNS // 8)
    kind = format_of(gate_up_proj_packed, gate_up_proj_scale)
    _checked("gate_up_proj_scale", gate_up_proj_scale, kind.scale, CHUNK_ROWS, 2 * CHUNK_COLUMNS // kind.group)
    if down_proj_packed.dtype == torch.bfloat16:
        _checked("down_proj_packed", down_proj_packed, torch.bfloat16, CHUNK_ROWS, CHUNK_COLUMNS)
    else:
        _checked("down_proj_packed", down_proj_packed, torch.int32, CHUNK_ROWS, CHUNK_COLUMNS // 8)
        if down_proj_scale is None:
            raise KernelError("down_proj_scale is None, expected the scales of the packed down_proj")
        _checked("down_proj_scale", down_proj_scale, kind.scale, CHUNK_ROWS, CHUNK_COLUMNS // kind.group)
    if kind is not INT4 and (w2_bf16 or down_proj_packed.dtype == torch.bfloat16):
        raise KernelError(f"down_proj_packed in bfloat16 goes with INT4 in groups of {GROUP}")
    each, scales = functools.partial(_each, in_place=in_place), _scales(CHUNK_COLUMNS // kind.group)
    first = (each(_put_words, gate_up_proj_packed, True), each(scales.put, gate_up_proj_scale, True))
    if down_proj_packed.dtype == torch.bfloat16:
        return PreparedW4A16(*first, each(_DENSE.put, down_proj_packed, False), None)
    assert down_proj_scale is not None
    if not w2_bf16:
        second = (each(_put_words, down_proj_packed, False), each(scales.put, down_proj_scale, False))
        return PreparedW4A16(*first, *second)
    experts, rows, words = down_proj_packed.shape
    dense = torch.empty(experts, rows, words * 8, dtype=torch.bfloat16, device=down_proj_packed.device)
    for packed, scale, target in zip(down_proj_packed, down_proj_scale, dense, strict=True):
        weight = dequantize_int4_group(packed, scale, GROUP, torch.bfloat16)
        target.copy_(_DENSE.put(weight, False))
    return PreparedW4A16(*first, dense, None)
