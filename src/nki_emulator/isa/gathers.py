"""`nki.isa`: gathers, shuffles and searches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nki_emulator.access import Call
from nki_emulator.errors import PlaceError
from nki_emulator.isa.operands import instruction, rows, same_sizes, shaped
from nki_emulator.tensor import NkiTensor

_CORE = 16  # partitions of one of the eight GpSimd cores


@instruction("gpsimd", like=("src_buffer", "dst"))
def local_gather(
    call: Call,
    dst: NkiTensor,
    src_buffer: NkiTensor,
    index: NkiTensor,
    num_elem_per_idx: int = 1,
    num_valid_indices: int | None = None,
) -> None:
    """Gather within groups of 16 partitions: one list of indices a group, read partition first."""
    call.need_dtype("index", index, ("uint16",))
    partitions = src_buffer.shape[0]
    holds = partitions == index.shape[0] and partitions % _CORE == 0
    call.need(holds, "index", f"{partitions} partitions, a multiple of {_CORE}", index.shape)
    call.need(num_elem_per_idx in (1, 2, 4, 8, 16, 32), "num_elem_per_idx", "1, 2, 4, 8, 16 or 32", num_elem_per_idx)
    total = index.free_size * _CORE
    valid = total if num_valid_indices is None else num_valid_indices
    call.need(0 < valid <= min(total, 4096), "num_valid_indices", f"1 to {min(total, 4096)}", valid)
    call.need(dst.free_size == valid * num_elem_per_idx, "dst", f"{valid * num_elem_per_idx} elements each", dst.shape)
    data, positions = rows(call.read("src_buffer", src_buffer)), rows(call.read("index", index))
    out = np.empty((partitions, valid * num_elem_per_idx), data.dtype)
    for first in range(0, partitions, _CORE):
        flat = positions[first : first + _CORE].T.reshape(-1)[:valid].astype(np.int64)
        columns = (flat[:, None] * num_elem_per_idx + np.arange(num_elem_per_idx)).reshape(-1)
        if (columns >= data.shape[1]).any():
            raise call.fail("index", f"indices within {data.shape[1]} elements", int(columns.max()))
        out[first : first + _CORE] = data[first : first + _CORE][:, columns]
    call.write("dst", dst, shaped(out, dst))


@instruction("gpsimd", like=("data", "dst"))
def nc_n_gather(call: Call, dst: NkiTensor, data: NkiTensor, indices: NkiTensor) -> None:
    """Gather within each partition."""
    call.need_dtype("indices", indices, ("uint32",))
    same_sizes(call, dst=dst, indices=indices)
    call.need(data.shape[0] == dst.shape[0], "data", f"{dst.shape[0]} partitions", data.shape)
    positions = rows(call.read("indices", indices)).astype(np.int64)
    if (positions >= data.free_size).any():
        raise call.fail("indices", f"indices within {data.free_size} elements", int(positions.max()))
    call.write("dst", dst, shaped(np.take_along_axis(rows(call.read("data", data)), positions, 1), dst))


@instruction("vector", like=("src", "dst"))
def nc_stream_shuffle(call: Call, dst: NkiTensor, src: NkiTensor, shuffle_mask: Sequence[int]) -> None:
    """Move partitions within each group of 32: output i comes from mask[i]; 255 leaves it as it was."""
    call.need(len(shuffle_mask) == 32, "shuffle_mask", "32 elements", len(shuffle_mask))
    call.need(dst.free_size == src.free_size, "dst", f"{src.free_size} elements a partition", dst.shape)
    active = -(-max(dst.shape[0], src.shape[0]) // 32) * 32
    for operand, tensor in (("src", src), ("dst", dst)):
        start = tensor.first_partition
        step = 128 if active > 64 else active
        if start % step:
            rule = f"{active} active partitions start at a multiple of {step}"
            raise call.fail(operand, rule, start, PlaceError)
    values = rows(call.read("src", src))
    if all(int(m) == 255 or int(m) < 32 for m in shuffle_mask) is False:
        raise call.fail("shuffle_mask", "0 to 31, or 255", list(shuffle_mask))
    source = np.array([int(shuffle_mask[p % 32]) for p in range(dst.shape[0])])
    moved = source != 255
    group = np.arange(dst.shape[0]) // 32 * 32
    wanted = np.where(moved, np.minimum(group, len(values) - 1 - (len(values) - 1) % 32) + source, 0)
    if (wanted[moved] >= len(values)).any():
        # A source of one partition, spread to many groups, is read from its own first group.
        wanted = np.where(moved, source, 0)
    if (wanted[moved] >= len(values)).any():
        raise call.fail("src", f"partition {int(wanted[moved].max())} that the mask names", src.shape)
    out = values[wanted]
    if not moved.all():
        out = np.where(moved[:, None], out, rows(call.read("dst", dst)))
    call.write("dst", dst, shaped(out, dst))


@instruction("vector")
def max8(call: Call, dst: NkiTensor, src: NkiTensor) -> None:
    """The 8 largest values of each partition, falling."""
    _need_columns(call, "src", src)
    call.need(dst.shape[0] == src.shape[0] and dst.free_size == 8, "dst", "8 elements a partition", dst.shape)
    values = rows(call.read32("src", src))
    call.write("dst", dst, shaped(np.ascontiguousarray(-np.sort(-values, axis=1)[:, :8]), dst))


@instruction("vector")
def nc_find_index8(call: Call, dst: NkiTensor, data: NkiTensor, vals: NkiTensor) -> None:
    """Where each of 8 values occurs first; equal values take successive occurrences."""
    call.need_dtype("dst", dst, ("uint16", "uint32"))
    _need_columns(call, "data", data)
    call.need(vals.free_size == 8, "vals", "8 elements a partition", vals.shape)
    call.need(dst.free_size == 8, "dst", "8 elements a partition", dst.shape)
    values, wanted = rows(call.read32("data", data)), rows(call.read32("vals", vals))
    missing = 0xFFFF if dst.dtype == "uint16" else 0xFFFFFFFF
    out = np.full((len(values), 8), missing, np.int64)
    for row in range(len(values)):
        used: dict[float, int] = {}
        for column in range(8):
            value = float(wanted[row, column])
            matches = np.flatnonzero(values[row] == np.float32(value))
            turn = used.get(value, 0)
            if turn < len(matches):
                out[row, column] = matches[turn]
            used[value] = turn + 1
    call.write("dst", dst, shaped(out.astype(np.uint32 if dst.dtype == "uint32" else np.uint16), dst))


@instruction("vector", alike=("dst", "data"))
def nc_match_replace8(
    call: Call, dst: NkiTensor, data: NkiTensor, vals: NkiTensor, imm: float, dst_idx: NkiTensor | None = None
) -> None:
    """Replace the first occurrence of each of 8 values; repeated values are paired from the last column."""
    call.need(vals.free_size == 8, "vals", "8 elements a partition", vals.shape)
    values, wanted = rows(call.read32("data", data)).copy(), rows(call.read32("vals", vals))
    positions = np.full((len(values), 8), 0xFFFFFFFF, np.int64)
    taken = np.zeros(values.shape, bool)
    for row in range(len(values)):
        for column in range(7, -1, -1):
            at = np.flatnonzero((values[row] == wanted[row, column]) & ~taken[row])
            if len(at):
                positions[row, column] = at[0]
                taken[row, at[0]] = True
    values[taken] = imm
    call.write("dst", dst, shaped(values, dst))
    if dst_idx is not None:
        call.tile("dst_idx", dst_idx)
        call.need_dtype("dst_idx", dst_idx, ("uint16", "uint32"))
        call.write("dst_idx", dst_idx, shaped(positions.astype(np.uint32), dst_idx))


def _need_columns(call: Call, operand: str, tensor: NkiTensor) -> None:
    call.need(8 <= tensor.free_size <= 16384, operand, "8 to 16384 elements a partition", tensor.free_size)


@instruction("gpsimd")
def nonzero_with_count(
    call: Call, dst: NkiTensor, src: NkiTensor, index_offset: int = 0, padding_val: int = -1
) -> None:
    """Indices of what is not zero, padding, and their number; partitions 0, 16, ... 112 alone."""
    call.need_dtype("src", src, ("float32", "int32"))
    call.need_dtype("dst", dst, ("int32",))
    call.need(dst.shape[0] == src.shape[0], "dst", f"{src.shape[0]} partitions", dst.shape)
    call.need(dst.free_size == src.free_size + 1, "dst", f"{src.free_size + 1} elements a partition", dst.shape)
    for partition in range(0, src.shape[0], _CORE):
        row = src[partition : partition + 1]
        indices = np.flatnonzero(rows(call.read("src", row))[0]) + index_offset
        out = np.full((1, dst.free_size), padding_val, np.int32)
        out[0, : len(indices)] = indices
        out[0, -1] = len(indices)
        target = dst[partition : partition + 1]
        call.write("dst", target, shaped(out, target))
