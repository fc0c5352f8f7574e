"""`nki.isa`: the DMA engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nki_emulator.access import Call, resolve, rows_within
from nki_emulator.errors import DtypeError, NkiError, PlaceError, UnsupportedError
from nki_emulator.isa.constants import dge_mode as dge_modes
from nki_emulator.isa.constants import engine as engines
from nki_emulator.isa.constants import oob_mode as oob_modes
from nki_emulator.isa.operands import instruction
from nki_emulator.ops import OPERATORS
from nki_emulator.storage import Region
from nki_emulator.tensor import NkiTensor

_PERMUTATIONS = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


def _reachable(call: Call, operand: str, tensor: Any) -> None:
    if not isinstance(tensor, NkiTensor):
        raise call.fail(operand, "a tensor", type(tensor).__name__)
    if tensor.buffer is Region.psum:
        raise call.fail(operand, "in HBM or SBUF: DMA does not reach PSUM", tensor.buffer.value, PlaceError)


@instruction("dma", check=_reachable)
def dma_copy(
    call: Call,
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None = None,
    oob_mode: Any = oob_modes.error,
    dge_mode: Any = dge_modes.unknown,
    engine: Any = engines.unknown,
) -> None:
    """Copy between HBM and SBUF: bit for bit if the dtypes are equal, otherwise through float32."""
    call.need(dst.size == src.size, "src", f"{dst.size} elements, as dst", src.shape)
    gathered = [t for t in (src, dst) if t.is_gathered]
    if gathered and dge_modes(dge_mode) is dge_modes.hwdge:
        raise call.fail("dge_mode", "swdge for a gather or scatter", dge_mode, NkiError)
    if dge_modes(dge_mode) is dge_modes.hwdge and src.dtype != dst.dtype:
        raise call.fail("src", f"dtype {dst.dtype} of dst under hwdge", src.dtype, DtypeError)
    call.instruction.details.update(mode=dge_modes(dge_mode).name, indirect=any(t.is_indirect() for t in (src, dst)))
    if engine is not engines.unknown:
        call.instruction.details["ring"] = engines(engine).name  # the engine that triggers it has a ring of its own
    if oob_modes(oob_mode) is oob_modes.skip:
        for operand, tensor in (("src", src), ("dst", dst)):
            if _scalar_out_of_bounds(call, operand, tensor):
                call.instruction.details["skipped"] = True
                return
        if gathered:
            _copy_rows_within_bounds(call, dst, src)
            return
    _copy(call, dst, src)


def _copy(call: Call, dst: NkiTensor, src: NkiTensor) -> None:
    read = call.read if src.dtype == dst.dtype else call.read32
    call.write("dst", dst, read("src", src).reshape(dst.shape))


def _scalar_out_of_bounds(call: Call, operand: str, tensor: NkiTensor) -> bool:
    if not tensor.is_indirect() or tensor.is_gathered:
        return False
    offset, _ = resolve(call, operand, tensor)
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
    return offset < 0 or offset + reach >= tensor.extent


def _copy_rows_within_bounds(call: Call, dst: NkiTensor, src: NkiTensor) -> None:
    """Rows whose index is out of bounds are left out."""
    index: dict[str, Any] = {}
    keep = np.ones(dst.shape[0], bool)
    for operand, tensor in (("src", src), ("dst", dst)):
        if tensor.is_gathered:
            _, rows = resolve(call, operand, tensor)
            assert rows is not None
            index[operand] = rows
            keep &= (rows >= 0) & (rows < rows_within(tensor))
    for row in np.flatnonzero(keep):
        operands: dict[str, NkiTensor] = {}
        for operand, tensor in (("src", src), ("dst", dst)):
            indirect = tensor.indirect_place
            if operand in index and indirect is not None:
                offset = tensor.offset + int(index[operand][row]) * indirect.stride
                shape = (1, *tensor.shape[1:])
                operands[operand] = tensor.with_layout(shape, tensor.strides, offset, indirect_place=None)
            else:
                operands[operand] = tensor[int(row) : int(row) + 1]
        _copy(call, operands["dst"], operands["src"])


@instruction("dma", check=_reachable, like=("src", "dst"))
def dma_transpose(
    call: Call,
    dst: NkiTensor,
    src: NkiTensor,
    axes: Sequence[int] | None = None,
    priority: int | None = None,
    dge_mode: Any = dge_modes.unknown,
    oob_mode: Any = oob_modes.error,
) -> None:
    """Transpose on the way: (1, 0), (2, 1, 0) or (3, 1, 2, 0)."""
    order = _PERMUTATIONS.get(src.ndim)
    if order is None or (axes is not None and tuple(axes) != order):
        raise call.fail("axes", "(1, 0), (2, 1, 0) or (3, 1, 2, 0) by the dimensions of src", axes)
    if src.itemsize not in (2, 4):
        raise call.fail("src", "a dtype of 2 or 4 bytes", src.dtype, DtypeError)
    if src.is_gathered:
        call.need(src.shape[0] % 16 == 0, "src", "a multiple of 16 rows to gather", src.shape[0])
        call.need(src.shape[-1] <= 128, "src", "at most 128 in the last dimension", src.shape[-1])
    call.instruction.details.update(mode=dge_modes(dge_mode).name, indirect=src.is_gathered, transpose=True)
    values = np.ascontiguousarray(call.read("src", src).transpose(order))
    call.need(values.size == dst.size, "dst", f"shape {values.shape}", dst.shape)
    call.write("dst", dst, values.reshape(dst.shape))


@instruction("dma", check=_reachable)
def dma_compute(
    call: Call,
    dst: NkiTensor,
    srcs: Sequence[NkiTensor],
    reduce_op: Any,
    scales: Sequence[float] | None = None,
    unique_indices: bool = True,
    oob_mode: Any = oob_modes.error,
) -> None:
    """Sum of the sources, in float32."""
    if reduce_op is not OPERATORS["add"]:
        raise call.fail("reduce_op", "nl.add", reduce_op, NkiError)
    if scales is not None and any(scale != 1.0 for scale in scales):
        raise call.fail("scales", "all 1.0", scales, NkiError)
    call.need(1 <= len(srcs) <= 16, "srcs", "1 to 16 sources", len(srcs))
    if any(t.is_indirect() for t in (dst, *srcs)) and not unique_indices:
        raise call.fail("unique_indices", "True", unique_indices, UnsupportedError)
    total: Any = np.float32(0)
    for number, src in enumerate(srcs):
        _reachable(call, f"srcs[{number}]", src)
        call.need(src.size == dst.size, f"srcs[{number}]", f"{dst.size} elements", src.shape)
        total = total + call.read32(f"srcs[{number}]", src).reshape(dst.shape)
    call.write("dst", dst, total)
