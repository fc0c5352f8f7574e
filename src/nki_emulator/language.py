"""`nki.language`: dtypes, memories, tensors, loops and the operators that instructions take."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import numpy as np

from nki_emulator.core import Tile, current
from nki_emulator.dtypes import NUMPY, PACKED, name_of, size_of
from nki_emulator.errors import CapacityError, DtypeError, PlaceError, ShapeError, UnsupportedError
from nki_emulator.limits import PARTITIONS, PSUM_BANK_BYTES, TileSize
from nki_emulator.ops import OPERATORS
from nki_emulator.registers import VirtualRegister
from nki_emulator.storage import CAPACITY, Region, Storage
from nki_emulator.tensor import DynamicSlice, NkiTensor

sbuf, psum = Region.sbuf, Region.psum
hbm = private_hbm = Region.private_hbm
shared_hbm = Region.shared_hbm
MemoryRegion = Region
tile_size = TileSize()
ds = DynamicSlice
tensor = NkiTensor


class _Objects(type):
    """A field of a dataclass that is not given is None: nki-library's own classes leave some out (README.md)."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if is_dataclass(cls):
            takes = inspect.signature(cls.__init__).parameters
            passed = {f.name for f in fields(cls)[: len(args)]} | kwargs.keys()
            for f in fields(cls):
                if (
                    f.init
                    and f.name in takes
                    and f.name not in passed
                    and f.default is MISSING
                    and f.default_factory is MISSING
                ):
                    kwargs[f.name] = None
        return super().__call__(*args, **kwargs)


class NKIObject(metaclass=_Objects):
    """Base of configuration objects in kernels."""

    def __init__(self, **kwargs: Any) -> None:
        for name, value in kwargs.items():
            setattr(self, name, value)


def ndarray(
    shape: Sequence[int],
    dtype: Any,
    buffer: Region = sbuf,
    name: str = "",
    address: tuple[int, int] | None = None,
) -> NkiTensor:
    """A new tensor; on chip the first dimension is the partition.

    Args:
        shape: positive sizes; on chip at least two dimensions, of which the first is at most 128.
        address: (partition, byte of the partition); without it the compiler places the tile.

    Raises:
        ShapeError: no such tile.
        CapacityError: it does not fit SBUF or PSUM by itself.
    """
    sizes = tuple(int(size) for size in shape)
    where = f"nki.language.ndarray({name})" if name else "nki.language.ndarray"
    try:
        form = name_of(dtype)
    except (KeyError, TypeError):
        raise DtypeError(where, "dtype", "a dtype of nki.language", dtype) from None
    if not sizes or any(size < 1 for size in sizes):
        raise ShapeError(where, "shape", "positive sizes", shape)
    core = current()
    if not buffer.on_chip:
        return _in_hbm(sizes, form, buffer, name)
    if len(sizes) < 2:
        raise ShapeError(where, "shape", "at least a partition and a free dimension", sizes)
    if sizes[0] > PARTITIONS:
        raise ShapeError(where, "shape", f"at most {PARTITIONS} partitions", sizes[0])
    nbytes = math.prod(sizes[1:]) * size_of(form)
    partition, byte = address or (0, 0)
    if byte + nbytes > CAPACITY[buffer]:
        rule = f"within the {CAPACITY[buffer]} bytes a partition of {buffer.value}"
        raise CapacityError(where, "shape" if address is None else "address", rule, byte + nbytes)
    if partition + sizes[0] > PARTITIONS:
        raise PlaceError(where, "address", f"within {PARTITIONS} partitions", partition + sizes[0])
    if byte % size_of(form):
        raise PlaceError(where, "address", f"a multiple of {size_of(form)} bytes", byte)
    if address is None:
        storage = Storage(buffer, sizes[0] * nbytes, nbytes)
        core.tiles.append(Tile(buffer, nbytes, name))
        return NkiTensor.whole(storage, form, sizes, name, tile=len(core.tiles) - 1)
    storage = core.physical(buffer)
    return NkiTensor.whole(storage, form, sizes, name, partition * storage.pitch + byte, core.next_mark())


def _in_hbm(shape: tuple[int, ...], dtype: str, buffer: Region, name: str) -> NkiTensor:
    core = current()

    def make() -> NkiTensor:
        return NkiTensor.whole(Storage(buffer, math.prod(shape) * size_of(dtype)), dtype, shape, name)

    if buffer is not shared_hbm or core.launch.cores == 1:
        return make()
    # Both cores run the same allocation: the first one makes it, the second one finds it.
    shared, turn = core.launch.shared, core.shared_made
    core.shared_made += 1
    if turn == len(shared):
        shared.append(make())
    allocated: NkiTensor = shared[turn]
    if allocated.shape != shape or allocated.dtype != dtype:
        rule = f"as on the other core: {allocated.shape} {allocated.dtype}"
        raise ShapeError(f"nki.language.ndarray({name})", "shape", rule, f"{shape} {dtype}")
    return allocated


def zeros(shape: Sequence[int], dtype: Any, buffer: Region = sbuf, name: str = "") -> NkiTensor:
    """A new tensor of zeros."""
    return full(shape, 0, dtype, buffer, name)


def full(shape: Sequence[int], value: float, dtype: Any, buffer: Region = sbuf, name: str = "") -> NkiTensor:
    """A new tensor of one value."""
    from nki_emulator.isa.copies import memset

    tensor = ndarray(shape, dtype, buffer, name)
    if buffer.on_chip:
        memset(tensor, value)
        return tensor
    tensor.storage.data.view(NUMPY[tensor.dtype])[...] = value
    tensor.storage.written = None
    return tensor


def load(src: NkiTensor, dtype: Any = None) -> NkiTensor:
    """A tile in SBUF with the values of a tensor in HBM."""
    from nki_emulator.isa.dma import dma_copy

    shape = src.shape if src.ndim > 1 else (1, *src.shape)
    tile = ndarray(shape, src.dtype if dtype is None else dtype)
    dma_copy(tile, src.reshape(shape) if not src.is_indirect() else src)
    return tile


def store(dst: NkiTensor, value: NkiTensor) -> None:
    """Write a tile to HBM."""
    from nki_emulator.isa.dma import dma_copy

    dma_copy(dst, value)


def shared_constant(constant: Any) -> NkiTensor:
    """A constant of the program, in shared HBM."""
    from nki_emulator.launch import argument

    array = np.load(constant) if isinstance(constant, str) else np.asarray(constant)
    hbm_tensor: NkiTensor = argument(array, shared_hbm)
    return hbm_tensor


def shared_identity_matrix(n: int, dtype: Any = "uint8", dst: NkiTensor | None = None) -> NkiTensor:
    """An identity matrix in SBUF."""
    from nki_emulator.access import Call

    tensor = ndarray((n, n), dtype, sbuf, "identity") if dst is None else dst
    Call("shared_identity_matrix", "dma", prefix="nki.language.").write("dst", tensor, np.eye(n, dtype=np.float32))
    return tensor


def program_id(axis: int = 0) -> int:
    """Number of this core."""
    return current().number


def num_programs(axes: Any = 0) -> int:
    """How many cores run the kernel."""
    cores: int = current().launch.cores
    return cores


def program_ndim() -> int:
    """Dimensions of the grid; 0 without one."""
    return 1 if num_programs() > 1 else 0


def affine_range(start: Any, stop: Any = None, step: int = 1) -> range:
    """`range`, unrolled while tracing."""
    return range(start) if stop is None else range(start, stop, step)


sequential_range = static_range = affine_range


def dynamic_range(start: Any, stop: Any = None, step: int = 1) -> Iterator[VirtualRegister]:
    """A loop on the device: yields a register."""
    low, high = (0, start) if stop is None else (start, stop)
    for value in range(_number(low), _number(high), step):
        yield VirtualRegister(value)


def fori_loop(lower: Any, upper: Any, body_fun: Callable[[VirtualRegister], None], step: int = 1) -> None:
    """A counted loop on the device."""
    for value in range(_number(lower), _number(upper), step):
        body_fun(VirtualRegister(value))


def while_loop(init: VirtualRegister, body_fun: Callable[[VirtualRegister], VirtualRegister]) -> None:
    """A loop on the device while a register is not zero."""
    register = init
    while register.value:
        register = body_fun(VirtualRegister(register.value))


def _number(value: Any) -> int:
    return value.value if isinstance(value, VirtualRegister) else int(value)


def is_hbm(buffer: Region) -> bool:
    """Whether a memory is HBM."""
    return not buffer.on_chip


def is_sbuf(buffer: Region) -> bool:
    """Whether a memory is SBUF."""
    return buffer is sbuf


def _names() -> dict[str, Any]:
    dtypes: dict[str, Any] = {name: name for name in (*NUMPY, *PACKED)}
    dtypes["bool_"] = dtypes["bool"]
    return {**dtypes, **OPERATORS}


globals().update(_names())


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise UnsupportedError(f"nki.language.{name}", "name", "one that the emulator has (README.md)")


__all__ = ["PSUM_BANK_BYTES", *[name for name in globals() if not name.startswith("_")]]
