"""Reads and writes of one instruction: windows of memory, checked against what was written, raced for and declared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nki_emulator.core import Access, Core, Instruction, current
from nki_emulator.dtypes import NUMPY, Array, narrow, size_of
from nki_emulator.errors import (
    DtypeError,
    NkiError,
    OverwrittenError,
    PlaceError,
    RaceError,
    ShapeError,
    UnwrittenError,
)
from nki_emulator.registers import VirtualRegister
from nki_emulator.settings import settings
from nki_emulator.storage import ALONE, Region
from nki_emulator.tensor import NkiTensor

# Unsigned integers as wide as an element, to look at the map of written bytes an element at a time.
_WIDTHS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
_SPREAD = {1: 0x01, 2: 0x0101, 4: 0x01010101}


class Call:
    """One instruction being emulated; names itself in every error.

    Args:
        operation: without the prefix, such as `tensor_copy`.
        engine: the engine that runs it: tensor, vector, scalar, gpsimd, dma or sync.
    """

    def __init__(self, operation: str, engine: str, prefix: str = "nki.isa.") -> None:
        self.operation = prefix + operation
        self.engine = engine
        self.core: Core = current()
        self.instruction = Instruction(operation, engine)
        self.core.instructions.append(self.instruction)

    def fail(self, operand: str, rule: str, actual: object = None, kind: type[NkiError] = ShapeError) -> NkiError:
        """The error to raise for an operand."""
        return kind(self.operation, operand, rule, actual)

    def need(self, holds: bool, operand: str, rule: str, actual: object = None) -> None:
        """Raise ShapeError unless the rule holds."""
        if not holds:
            raise self.fail(operand, rule, actual)

    def need_dtype(self, operand: str, tensor: NkiTensor, allowed: tuple[str, ...] | frozenset[str]) -> None:
        """Raise DtypeError unless the operand has one of these dtypes."""
        if tensor.dtype not in allowed:
            raise self.fail(operand, f"one of {', '.join(sorted(allowed))}", tensor.dtype, DtypeError)

    def need_region(self, operand: str, tensor: NkiTensor, *allowed: Region) -> None:
        """Raise PlaceError unless the operand lies in one of these memories."""
        if tensor.buffer not in allowed:
            rule = "in " + " or ".join(region.value for region in allowed)
            raise self.fail(operand, rule, tensor.buffer.value, PlaceError)

    def tile(self, operand: str, tensor: Any) -> NkiTensor:
        """Check what every engine demands of a tile: on chip, partitions, start, dimensions."""
        if not isinstance(tensor, NkiTensor):
            raise self.fail(operand, "a tensor", type(tensor).__name__)
        if self.engine == "gpsimd":
            self.need_region(operand, tensor, Region.sbuf)
        self.need_region(operand, tensor, Region.sbuf, Region.psum)
        if tensor.is_gathered:
            raise self.fail(operand, "no vector_offset: the DMA engines alone gather so", kind=PlaceError)
        partitions = tensor.shape[0]
        self.need(partitions <= 128, operand, "at most 128 partitions", partitions)
        if partitions > 1 and tensor.strides[0] != tensor.row:
            raise self.fail(operand, "neighbouring partitions", f"step {tensor.strides[0] / tensor.row:g}")
        start = tensor.first_partition
        step = 128 if partitions > 64 else 64 if partitions > 32 else 32
        if start % step:
            rule = f"{partitions} partitions start at a multiple of {step}"
            raise self.fail(operand, rule, start, PlaceError)
        return tensor

    def read(self, operand: str, tensor: NkiTensor) -> Array:
        """Values in the form that they are stored in; a view, not to be written."""
        offset, index = resolve(self, operand, tensor)
        window = open_window(self, operand, tensor, tensor.storage.data, offset, form_of(tensor))
        self._check_written(operand, tensor, offset, index)
        self._note(operand, tensor, offset, window)
        return window if index is None else gather(self, operand, tensor, window, index)

    def read32(self, operand: str, tensor: NkiTensor) -> Array:
        """Values as float32."""
        return self.read(operand, tensor).astype(np.float32, copy=False)

    def write(self, operand: str, tensor: NkiTensor, values: Array) -> None:
        """Store values of the same number of elements, rounded to the tensor's dtype."""
        offset, index = resolve(self, operand, tensor)
        form = form_of(tensor)
        window = open_window(self, operand, tensor, tensor.storage.data, offset, form)
        stored = values if values.dtype == form and tensor.dtype != "tfloat32" else narrow(values, tensor.dtype)
        if stored.size != tensor.size:
            raise self.fail(operand, f"{stored.size} elements", tensor.shape)

        def before() -> Array:
            return window if index is None else gather(self, operand, tensor, window, index)

        self._note(operand, tensor, offset, window, lambda: before().tobytes() == stored.tobytes())
        if index is not None:
            _check_rows(self, operand, tensor, index)
        elif any(s == 0 and n > 1 for s, n in zip(tensor.strides, tensor.shape, strict=True)):
            raise self.fail(operand, "a destination without a broadcast dimension", tensor.get_pattern())
        window[... if index is None else index] = stored.reshape(tensor.shape)
        storage = tensor.storage
        if storage.written is None:
            return
        if index is None and tensor.mark == ALONE and tensor.size * tensor.itemsize == len(storage.data):
            storage.written = None
            return
        marks, own = _marks(self, operand, tensor, storage.written, offset)
        marks[... if index is None else index] = own

    def _check_written(self, operand: str, tensor: NkiTensor, offset: int, index: Array | None) -> None:
        storage = tensor.storage
        if storage.written is None or settings.unwritten_allowed:
            return
        marks, own = _marks(self, operand, tensor, storage.written, offset)
        if index is not None:
            marks = gather(self, operand, tensor, marks, index)
        if (marks == own).all():
            return
        wrong = np.argwhere(marks != own)[0]
        value = int(marks[tuple(wrong)])
        if value and tensor.mark != ALONE:
            rule = "holds what the kernel wrote to it; another tile at the same address has overwritten it"
            raise self.fail(operand, rule, f"{tensor} at {tuple(map(int, wrong))}", OverwrittenError)
        rule = "is written before it is read"
        raise self.fail(operand, rule, f"{tensor} at {tuple(map(int, wrong))}", UnwrittenError)

    def _note(
        self, operand: str, tensor: NkiTensor, offset: int, window: Array,
        unchanged: Callable[[], bool] | None = None,
    ) -> None:  # fmt: skip
        """An access, a write where it says whether it leaves all values as they were."""
        written = unchanged is not None
        self.instruction.accesses.append(box(tensor, offset, operand, written))
        if tensor.tile >= 0:
            tile = self.core.tiles[tensor.tile]
            tile.last = len(self.core.instructions)
            if tile.first < 0:
                tile.first = tile.last
        if tensor.buffer is not Region.shared_hbm or self.core.launch.cores == 1 or settings.races_allowed:
            return
        touched, place = tensor.storage.touched, window
        if tensor.is_indirect():
            place = tensor.storage.data[tensor.base : tensor.base + tensor.extent * tensor.itemsize]
        for theirs_written, theirs in touched.get(1 - self.core.number, ()):
            if not (written or theirs_written) or not np.shares_memory(place, theirs):
                continue
            if theirs_written and unchanged is not None and unchanged():
                continue  # both cores store the same values
            did, does = "wrote" if theirs_written else "read", "writes" if written else "reads"
            rule = (
                f"core {1 - self.core.number} {did} what this core {does}: a core_barrier over the tensor lies between"
            )
            raise self.fail(operand, rule, tensor, RaceError)
        touched.setdefault(self.core.number, []).append((written, place))


def _marks(call: Call, operand: str, tensor: NkiTensor, written: Array, offset: int) -> tuple[Array, Any]:
    """The map of written bytes an element at a time, and what the tensor's own writes leave there."""
    width = _WIDTHS[tensor.itemsize]
    marks = open_window(call, operand, tensor, written, offset, np.dtype(width))
    return marks, width(_SPREAD[tensor.itemsize] * tensor.mark)


def form_of(tensor: NkiTensor) -> np.dtype[Any]:
    """NumPy form of the elements; packed dtypes as plain integers."""
    return NUMPY[tensor.dtype] if tensor.dtype in NUMPY else np.dtype(_WIDTHS[tensor.itemsize])


def resolve(call: Call, operand: str, tensor: NkiTensor) -> tuple[int, Array | None]:
    """(element offset, row of every partition or None) with run-time places looked up."""
    indirect = tensor.indirect_place
    if indirect is None:
        return tensor.offset, None
    if isinstance(indirect.index, VirtualRegister):
        indices = np.array([indirect.index.value])
    else:
        if indirect.index.buffer is not Region.sbuf:
            raise call.fail(operand, "an index in SBUF", indirect.index.buffer.value, PlaceError)
        indices = call.read(f"{operand} (index)", indirect.index).reshape(-1).astype(np.int64)
    if indirect.a_partition:
        call.need(len(indices) == tensor.shape[0], operand, f"{tensor.shape[0]} indices", len(indices))
        return tensor.offset, indices
    call.need(len(indices) == 1, operand, "one index", len(indices))
    return tensor.offset + int(indices[0]) * indirect.stride, None


def open_window(call: Call, operand: str, tensor: NkiTensor, memory: Array, offset: int, form: np.dtype[Any]) -> Array:
    """A strided NumPy view of the bytes that the tensor names.

    Raises:
        ShapeError: it reaches beyond the tile.
    """
    item = tensor.itemsize
    indirect = tensor.indirect_place
    shape, strides = tensor.shape, tensor.strides
    if indirect is not None and indirect.a_partition:
        # The rows that may be chosen, in place of those of the pattern.
        shape, strides = (max(rows_within(tensor), 1), *shape[1:]), (indirect.stride, *strides[1:])
    reach = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    if tensor.row:
        partition, column = divmod(offset, tensor.row)
        if column + sum(reach[1:]) >= tensor.row or (partition + shape[0]) * tensor.row > tensor.extent or offset < 0:
            raise call.fail(
                operand, f"a pattern within the tile's {tensor.extent // tensor.row} x {tensor.row}", tensor
            )
        start = tensor.base + partition * tensor.storage.pitch + column * item
        steps = [tensor.storage.pitch, *(stride * item for stride in strides[1:])]
    else:
        if offset < 0 or offset + sum(reach) >= tensor.extent:
            if indirect is not None and not indirect.a_partition:
                raise call.fail(operand, f"an index below {indirect.extent}", f"element {offset} of {tensor.extent}")
            if indirect is None or offset < 0:
                raise call.fail(operand, f"a pattern within the tensor's {tensor.extent} elements", tensor)
        start = tensor.base + offset * item
        steps = [stride * item for stride in strides]
    if (start % item or any(step % item for step in steps)) and form.itemsize > 1:
        raise call.fail(operand, f"an address that is a multiple of {item} bytes", start, PlaceError)
    return np.ndarray(shape, form, buffer=memory, offset=start, strides=steps)


def gather(call: Call, operand: str, tensor: NkiTensor, window: Array, index: Array) -> Array:
    """Rows of a window by index."""
    _check_rows(call, operand, tensor, index)
    return window[index]


def _check_rows(call: Call, operand: str, tensor: NkiTensor, index: Array) -> None:
    rows = rows_within(tensor)
    outside = index[(index < 0) | (index >= rows)]
    if len(outside):
        raise call.fail(operand, f"indices of 0 to {rows - 1}", int(outside[0]))


def rows_within(tensor: NkiTensor) -> int:
    """How many rows an index may reach without leaving the tensor."""
    indirect = tensor.indirect_place
    assert indirect is not None
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape[1:], tensor.strides[1:], strict=True))
    return min(indirect.extent, (tensor.extent - 1 - reach - tensor.offset) // max(indirect.stride, 1) + 1)


def box(tensor: NkiTensor, offset: int, operand: str, written: bool) -> Access:
    """The box of memory that a view covers, for dependences and cost."""
    item = size_of(tensor.dtype)
    run = item
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size > 1 and stride * item != run:
            break
        run *= size
    run = min(run, tensor.free_size * item) if tensor.row else run
    if tensor.row:
        partition, column = divmod(offset, tensor.row)
        low = tensor.base // tensor.storage.pitch + partition
        high = low + tensor.shape[0]
        first = tensor.base % tensor.storage.pitch + column * item
        last = first + (1 + tensor.reach) * item
    else:
        low, high = 0, 1
        first = tensor.base + offset * item
        last = first + (1 + tensor.reach) * item
        if tensor.indirect_place is not None:
            first, last = tensor.base, tensor.base + tensor.extent * item
    return Access(
        tensor.storage.number, tensor.buffer, low, high, first, last, written, operand, tensor.dtype,
        tensor.free_size, tensor.shape[0], run,
    )  # fmt: skip
