"""`nki.isa`: the Tensor Engine, and transposes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from nki_emulator.access import Call, box, open_window
from nki_emulator.dtypes import FP8, Array
from nki_emulator.errors import DtypeError, NkiError, PlaceError, UnwrittenError
from nki_emulator.isa.constants import engine as engines
from nki_emulator.isa.constants import matmul_perf_mode
from nki_emulator.isa.operands import instruction, rows, shaped
from nki_emulator.limits import MOVING_COLUMNS, PARTITIONS, PSUM_BANK_BYTES, STATIONARY_COLUMNS
from nki_emulator.storage import Region
from nki_emulator.tensor import NkiTensor

_INPUTS = frozenset({"float8_e4m3", "float8_e5m2", "bfloat16", "float16", "tfloat32", "float32"})
_WIDE = ("float32", "tfloat32")


@instruction("tensor")
def nc_matmul(
    call: Call,
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: tuple[int, ...] = (),
    tile_size: tuple[int, ...] = (),
    perf_mode: Any = matmul_perf_mode.none,
) -> None:
    """dst (PSUM) = or += stationary.T @ moving, contracted over partitions, summed in float32."""
    for operand, tensor in (("stationary", stationary), ("moving", moving)):
        call.need_region(operand, tensor, Region.sbuf)
        call.need_dtype(operand, tensor, _INPUTS)
    call.need_region("dst", dst, Region.psum)
    if (stationary.dtype in _WIDE) != (moving.dtype in _WIDE):
        rule = f"32 bits wide as stationary ({stationary.dtype}), or both narrower"
        raise call.fail("moving", rule, moving.dtype, DtypeError)
    double = perf_mode is matmul_perf_mode.double_row or str(getattr(perf_mode, "value", perf_mode)) == "double_row"
    left, right = call.read32("stationary", stationary), call.read32("moving", moving)
    if double:
        for operand, tensor in (("stationary", stationary), ("moving", moving)):
            call.need_dtype(operand, tensor, FP8)
            call.need(tensor.ndim > 2 and tensor.shape[1] == 2, operand, "a first free dimension of 2", tensor.shape)
        left = np.concatenate((left[:, 0], left[:, 1]))
        right = np.concatenate((right[:, 0], right[:, 1]))
    left, right = rows(left), rows(right)
    _check_tile(call, stationary, moving, left.shape[1], right.shape[1], tile_position, tile_size)
    wide, deep = left.shape[1], right.shape[1]
    call.need(dst.shape[0] == wide and dst.free_size == deep, "dst", f"({wide}, {deep})", dst.shape)
    call.need(moving.shape[0] == stationary.shape[0], "moving", f"{stationary.shape[0]} partitions", moving.shape)
    call.instruction.details.update(
        moving=deep,
        wide=stationary.dtype in _WIDE,
        double=double,
        transpose=is_transpose,
        contracted=stationary.shape[0],
        onezero=is_stationary_onezero or is_moving_onezero,
    )
    hinted = (("stationary", is_stationary_onezero, left), ("moving", is_moving_onezero, right))
    for operand, hint, values in hinted:
        if hint and not ((values == 0) | (values == 1)).all():
            raise call.fail(operand, f"ones and zeros, as is_{operand}_onezero says", "other values", NkiError)
    if is_transpose:
        _transpose(call, dst, stationary, left, right)
        return
    call.need_dtype("dst", dst, ("float32",))
    _in_one_bank(call, dst)
    _sum(call, dst, left.T @ right, accumulate)


def _check_tile(
    call: Call,
    stationary: NkiTensor,
    moving: NkiTensor,
    wide: int,
    deep: int,
    position: tuple[int, ...],
    size: tuple[int, ...],
) -> None:
    call.need(bool(position) == bool(size), "tile_position", "set together with tile_size", position)
    high, broad = size or (PARTITIONS, STATIONARY_COLUMNS)
    call.need(high in (32, 64, 128) and broad in (32, 64, 128), "tile_size", "sizes of 32, 64 or 128", size)
    if position:
        holds = position[0] % high == 0 and position[1] % broad == 0 and max(position) < PARTITIONS
        call.need(holds, "tile_position", f"multiples of {size} below {PARTITIONS}", position)
    call.need(stationary.shape[0] <= high, "stationary", f"at most {high} partitions", stationary.shape[0])
    call.need(wide <= broad, "stationary", f"at most {broad} columns", wide)
    call.need(deep <= MOVING_COLUMNS, "moving", f"at most {MOVING_COLUMNS} columns", deep)


def _in_one_bank(call: Call, dst: NkiTensor) -> None:
    place = box(dst, dst.offset, "dst", written=True)
    holds = place.first // PSUM_BANK_BYTES == (place.last - 1) // PSUM_BANK_BYTES
    rule = f"within one PSUM bank of {PSUM_BANK_BYTES} bytes"
    call.need(holds, "dst", rule, f"bytes {place.first} to {place.last}")


def _sum(call: Call, dst: NkiTensor, product: Array, accumulate: bool | None) -> None:
    """Write, or add to what earlier matmuls left.

    A location counts as begun when a matmul has written it since the tile was made by `nl.ndarray`.
    """
    product = shaped(np.ascontiguousarray(product, np.float32), dst)
    storage = dst.storage
    if storage.accumulated is None:
        storage.accumulated = np.zeros_like(storage.data)
    marks = open_window(call, "dst", dst, storage.accumulated, dst.offset, np.dtype(np.uint32))
    begun = marks == dst.mark
    if accumulate is False or (accumulate is None and not begun.any()):
        call.write("dst", dst, product)
    elif begun.all():
        call.write("dst", dst, call.read("dst", dst) + product)
    elif accumulate:
        if storage.written is None or storage.written.any():
            rule = "begun by a matmul: adding to what another instruction wrote is undefined on Trainium2"
            raise call.fail("dst", rule, dst, NkiError)
        raise call.fail("dst", "begun by a matmul with accumulate=False", dst, UnwrittenError)
    else:
        data = open_window(call, "dst", dst, storage.data, dst.offset, np.dtype(np.float32))
        call.write("dst", dst, np.where(begun, data, np.float32(0)) + product)
    marks[...] = dst.mark


def _transpose(call: Call, dst: NkiTensor, data: NkiTensor, left: Array, right: Array) -> None:
    """The Tensor Engine's transpose passes values through unchanged; the moving tile is an identity matrix."""
    if not np.array_equal(right, np.eye(len(right), dtype=np.float32)):
        _sum(call, dst, left.T @ right, False) if dst.dtype == "float32" else call.write("dst", dst, left.T @ right)
        return
    call.write("dst", dst, shaped(np.ascontiguousarray(left.T), dst))


def _of_transpose(arguments: Mapping[str, Any]) -> str | None:
    dst, data = arguments["dst"], arguments["data"]
    small = data.shape[0] <= 32 and data.free_size <= 32
    return "vector" if small and not (dst.buffer is Region.psum and data.buffer is Region.sbuf) else None


@instruction("tensor", "vector", default=_of_transpose)
def nc_transpose(call: Call, dst: NkiTensor, data: NkiTensor, engine: Any = engines.unknown) -> None:
    """Swap partitions and the flattened free dimensions; bit for bit."""
    limit = 128 if call.engine == "tensor" else 32
    holds = data.shape[0] <= limit and data.free_size <= limit
    call.need(holds, "data", f"at most {limit} x {limit} on the {call.engine} engine", data.shape)
    holds = dst.shape[0] == data.free_size and dst.free_size == data.shape[0]
    call.need(holds, "dst", f"({data.free_size}, {data.shape[0]})", dst.shape)
    if call.engine == "tensor":
        if data.buffer is not Region.sbuf:
            raise call.fail("data", "in SBUF for the Tensor Engine", data.buffer.value, PlaceError)
        if dst.buffer is not Region.psum:
            raise call.fail("dst", "in PSUM for the Tensor Engine", dst.buffer.value, PlaceError)
    call.instruction.details.update(
        moving=data.shape[0], wide=data.itemsize == 4, double=False, transpose=True, contracted=data.shape[0]
    )
    values = rows(call.read("data", data)).T
    if dst.dtype != data.dtype:
        # The documentation wants equal dtypes; nki-library transposes BF16 into float32 (README.md).
        values = np.ascontiguousarray(rows(call.read32("data", data)).T)
    call.write("dst", dst, shaped(np.ascontiguousarray(values), dst))
