"""`nki.isa`: copies and fills on chip."""

from __future__ import annotations

from typing import Any

import numpy as np

from nki_emulator.access import Call, form_of
from nki_emulator.dtypes import INTEGERS, PACKED, narrow
from nki_emulator.errors import DtypeError
from nki_emulator.isa.constants import engine as engines
from nki_emulator.isa.operands import instruction, same_sizes, shaped
from nki_emulator.storage import Region
from nki_emulator.tensor import NkiTensor


@instruction("vector", "scalar", "gpsimd", alike=True)
def tensor_copy(call: Call, dst: NkiTensor, src: NkiTensor, engine: Any = engines.unknown) -> None:
    """Copy between SBUF and PSUM: bit for bit if the dtypes are equal, otherwise through float32."""
    read = call.read if src.dtype == dst.dtype else call.read32
    call.write("dst", dst, shaped(read("src", src), dst))


@instruction("vector", "gpsimd")
def memset(call: Call, dst: NkiTensor, value: Any, engine: Any = engines.unknown) -> None:
    """Fill with a constant."""
    if dst.dtype in PACKED:
        call.need(value == 0, "value", "0 for packed dtypes", value)
        call.write("dst", dst, np.zeros(dst.shape, form_of(dst)))
        return
    if isinstance(value, float) and dst.dtype in INTEGERS:
        raise call.fail("value", f"a whole number for {dst.dtype}", value, DtypeError)
    kind = np.int64 if isinstance(value, int) else np.float32
    call.write("dst", dst, np.broadcast_to(narrow(np.asarray([value], kind), dst.dtype), dst.shape))


@instruction("vector")
def tensor_copy_predicated(
    call: Call, dst: NkiTensor, src: Any, predicate: NkiTensor, reverse_pred: bool = False
) -> None:
    """Copy where the predicate holds; elsewhere dst keeps what it holds."""
    call.need_dtype("predicate", predicate, ("uint8", "uint16", "uint32"))
    chosen = shaped(call.read("predicate", predicate) != 0, dst)
    if isinstance(src, NkiTensor):
        call.tile("src", src)
        same_sizes(call, dst=dst, src=src, predicate=predicate)
        if src.dtype != dst.dtype:
            raise call.fail("src", f"dtype {dst.dtype} of dst", src.dtype, DtypeError)
        if src.buffer is Region.psum and predicate.buffer is Region.psum:
            raise call.fail("predicate", "not in PSUM together with src")
        values = shaped(call.read("src", src), dst)
    else:
        same_sizes(call, dst=dst, predicate=predicate)
        values = np.broadcast_to(narrow(np.asarray([src], np.float32), dst.dtype), dst.shape)
    if reverse_pred:
        chosen = ~chosen
    if chosen.all():
        call.write("dst", dst, values)
    else:
        call.write("dst", dst, np.where(chosen, values, call.read("dst", dst)))


@instruction("gpsimd")
def iota(call: Call, dst: NkiTensor, pattern: Any, offset: int = 0, channel_multiplier: int = 0) -> None:
    """offset + partition * channel_multiplier + the steps of a pattern, in int32."""
    values = affine(call, dst, pattern, offset, channel_multiplier)
    call.write("dst", dst, values if form_of(dst).kind in "iu" else values.astype(np.float32))


def affine(call: Call, dst: NkiTensor, pattern: Any, offset: int, channel_multiplier: int) -> Any:
    """Values of an affine pattern, int32, in the shape of dst."""
    call.need(1 <= len(pattern) <= 4, "pattern", "1 to 4 dimensions", len(pattern))
    total = np.zeros((1,), np.int64)
    for step, count in pattern:
        total = (total[:, None] + np.arange(count) * step).reshape(-1)
    call.need(len(total) == dst.free_size, "pattern", f"{dst.free_size} elements a partition", len(total))
    rows = offset + channel_multiplier * np.arange(dst.shape[0])
    return (rows[:, None] + total[None, :]).astype(np.int32).reshape(dst.shape)
