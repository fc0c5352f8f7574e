"""`NkiTensor`: a strided view of a storage, with the view operations of `nki.language`.

Strides and offsets count elements, as in NKI. On chip, dimension 0 is the partition; its stride counts the elements of
a whole row of the tile, so `offset // row` is the first partition and `offset % row` the place in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar

from nki_emulator.dtypes import size_of
from nki_emulator.errors import ShapeError, UnsupportedError
from nki_emulator.settings import before, settings
from nki_emulator.storage import ALONE, Region, Storage

_Method = TypeVar("_Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class Indirect:
    """A place known when the instruction runs: `index` times `stride` elements, one index or one a partition."""

    index: Any
    stride: int
    extent: int
    a_partition: bool


@dataclass(frozen=True)
class DynamicSlice:
    """`nl.ds(start, size)`."""

    start: int
    size: int


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _from_05(method: _Method) -> _Method:
    """A view that NKI has from 0.5 on."""

    @wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before("0.5"):
            where = f"nki.language.NkiTensor.{method.__name__}"
            raise UnsupportedError(where, "method", "one of this release: it comes with NKI 0.5", settings.release)
        return method(self, *args, **kwargs)

    return checked  # type: ignore[return-value]


@dataclass(frozen=True, eq=False)
class NkiTensor:
    """See the module; made by `nl.ndarray` and by its own methods.

    Attributes:
        base: byte of the storage where the tile begins.
        row: elements of one partition of the tile; 0 in HBM.
        extent: elements of the tile.
        mark: what its writes leave in the storage's map.
    """

    storage: Storage
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    base: int
    row: int
    extent: int
    buffer: Region
    name: str
    mark: int
    tile: int
    indirect_place: Indirect | None = None

    @classmethod
    def whole(
        cls, storage: Storage, dtype: str, shape: tuple[int, ...], name: str, base: int = 0, mark: int = ALONE,
        tile: int = -1,
    ) -> NkiTensor:  # fmt: skip
        """A dense tensor of a storage, from byte `base` on; on chip of at least two dimensions."""
        count = math.prod(shape)
        row = count // shape[0] if storage.region.on_chip else 0
        return cls(storage, dtype, shape, row_major(shape), 0, base, row, count, storage.region, name, mark, tile)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return size_of(self.dtype)

    @property
    def free_size(self) -> int:
        """Elements of one partition."""
        return math.prod(self.shape[1:])

    @property
    def first_partition(self) -> int:
        """Of SBUF or PSUM, where the view begins."""
        return self.base // self.storage.pitch + self.offset // self.row

    @property
    def reach(self) -> int:
        """Elements from the first of a partition (in HBM: of all) to the last."""
        begin = 1 if self.row else 0
        return sum((n - 1) * s for n, s in zip(self.shape[begin:], self.strides[begin:], strict=True))

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"{self.name or 'tensor'}({self.shape}, {self.dtype}, {self.buffer.value})"

    @property
    def is_gathered(self) -> bool:
        """Whether each partition's row is chosen by an index."""
        return self.indirect_place is not None and self.indirect_place.a_partition

    def is_indirect(self) -> bool:
        """Whether a place in it is resolved at run time."""
        return self.indirect_place is not None

    def is_contiguous(self) -> bool:
        """Dense in row-major order; on chip within each partition."""
        first = 1 if self.buffer.on_chip else 0
        step = 1
        for size, stride in zip(reversed(self.shape[first:]), reversed(self.strides[first:]), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    def get_pattern(self) -> list[list[int]]:
        """`[[stride, count], ...]`, as `ap` takes it."""
        return [[stride, size] for stride, size in zip(self.strides, self.shape, strict=True)]

    def with_layout(
        self, shape: Iterable[int], strides: Iterable[int], offset: int | None = None, **more: Any
    ) -> NkiTensor:
        """Another layout over the same storage."""
        start = self.offset if offset is None else offset
        return replace(self, shape=tuple(shape), strides=tuple(strides), offset=start, **more)

    def _replaced(self, begin: int, end: int, sizes: Iterable[int], strides: Iterable[int]) -> NkiTensor:
        """Dimensions `begin` to `end` (exclusive) replaced."""
        return self.with_layout(
            (*self.shape[:begin], *sizes, *self.shape[end:]), (*self.strides[:begin], *strides, *self.strides[end:])
        )

    def _fail(self, method: str, rule: str, actual: object = None) -> ShapeError:
        return ShapeError(f"nki.language.NkiTensor.{method}", self.name or "tensor", rule, actual)

    def __getitem__(self, key: Any) -> NkiTensor:
        keys = list(key) if isinstance(key, tuple) else [key]
        if Ellipsis in [k for k in keys if not isinstance(k, NkiTensor)]:
            at = keys.index(Ellipsis)
            keys[at : at + 1] = [slice(None)] * (self.ndim - len(keys) + 1)
        if len(keys) > self.ndim:
            raise self._fail("__getitem__", f"at most {self.ndim} indices", len(keys))
        keys += [slice(None)] * (self.ndim - len(keys))
        shape, strides, offset = [], [], self.offset
        for dim, (k, size, stride) in enumerate(zip(keys, self.shape, self.strides, strict=True)):
            if isinstance(k, DynamicSlice):
                k = slice(k.start, k.start + k.size)
            if isinstance(k, slice):
                start, stop, step = k.indices(size)
                if (k.stop is not None and k.stop > size) or stop <= start or step < 1:
                    raise self._fail("__getitem__", f"a slice within dimension {dim} of {size}, not empty", k)
                shape.append((stop - start + step - 1) // step)
                strides.append(stride * step)
                offset += start * stride
            elif isinstance(k, NkiTensor):
                raise self._fail("__getitem__", "a dynamic index goes through select, vector_select or ap", k)
            else:
                position = int(k) + (size if k < 0 else 0)
                if not 0 <= position < size:
                    raise self._fail("__getitem__", f"an index within dimension {dim} of {size}", k)
                offset += position * stride
                if dim == 0 and self.buffer.on_chip:
                    shape.append(1)
                    strides.append(stride)
        least = 2 if self.buffer.on_chip else 1
        while len(shape) < least:
            shape.append(1)
            strides.append(1)
        return self.with_layout(shape, strides, offset)

    @_from_05
    def slice(self, dim: int, start: int, end: int, step: int = 1) -> NkiTensor:
        """Elements start to end (exclusive) of one dimension."""
        return self[(slice(None),) * dim + (slice(start, end, step),)]

    @_from_05
    def permute(self, dims: Sequence[int]) -> NkiTensor:
        """Dimensions in another order; the partition stays first."""
        if sorted(dims) != list(range(self.ndim)) or (self.buffer.on_chip and dims[0] != 0):
            raise self._fail("permute", "a permutation that leaves the partition in front", dims)
        return self.with_layout((self.shape[d] for d in dims), (self.strides[d] for d in dims))

    @_from_05
    def broadcast(self, dim: int, size: int) -> NkiTensor:
        """A dimension of size 1 repeated."""
        if self.shape[dim] != 1 or (dim == 0 and self.buffer.on_chip):
            raise self._fail("broadcast", "a free dimension of size 1", f"dimension {dim} of {self.shape}")
        return self._replaced(dim, dim + 1, (size,), (0,))

    @_from_05
    def expand_dim(self, dim: int) -> NkiTensor:
        """A new dimension of size 1."""
        if dim == 0 and self.buffer.on_chip:
            raise self._fail("expand_dim", "no dimension before the partition")
        return self._replaced(dim, dim, (1,), (1,))

    @_from_05
    def squeeze_dim(self, dim: int) -> NkiTensor:
        """Without a dimension of size 1."""
        if self.shape[dim] != 1 or (dim == 0 and self.buffer.on_chip):
            raise self._fail("squeeze_dim", "a free dimension of size 1", f"dimension {dim} of {self.shape}")
        return self._replaced(dim, dim + 1, (), ())

    @_from_05
    def reshape_dim(self, dim: int, shape: Sequence[int]) -> NkiTensor:
        """One dimension split into several."""
        sizes = list(shape)
        if -1 in sizes:
            sizes[sizes.index(-1)] = self.shape[dim] // -math.prod(sizes)
        if math.prod(sizes) != self.shape[dim] or (dim == 0 and self.buffer.on_chip and len(sizes) > 1):
            raise self._fail("reshape_dim", f"sizes whose product is {self.shape[dim]}, not of the partition", shape)
        steps = [step * self.strides[dim] for step in row_major(sizes)]
        return self._replaced(dim, dim + 1, sizes, steps)

    @_from_05
    def flatten_dims(self, start_dim: int, end_dim: int) -> NkiTensor:
        """Neighbouring dimensions merged."""
        merged = math.prod(self.shape[start_dim : end_dim + 1])
        return self.reshape((*self.shape[:start_dim], merged, *self.shape[end_dim + 1 :]))

    def reshape(self, *shape: Any) -> NkiTensor:
        """Another shape of the same elements, without a copy."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else tuple(shape)
        if math.prod(sizes) != self.size:
            raise self._fail("reshape", f"{self.size} elements", sizes)
        keep = 0
        if self.buffer.on_chip:
            if sizes[0] != self.shape[0]:
                raise self._fail("reshape", f"{self.shape[0]} partitions as before", sizes)
            keep = 1
        strides = _restride(self.shape[keep:], self.strides[keep:], sizes[keep:])
        if strides is None:
            raise self._fail("reshape", "a layout that the new shape can stride over", f"{self.shape} to {sizes}")
        return self.with_layout(sizes, (*self.strides[:keep], *strides))

    @_from_05
    def rearrange(self, src: Sequence[Any], dst: Sequence[Any], fixed_sizes: dict[str, int] | None = None) -> NkiTensor:
        """Split, reorder and merge dimensions by name."""
        sizes = dict(fixed_sizes or {})
        names: list[str] = []
        split = self
        for group, size in zip(src, self.shape, strict=True):
            members = (group,) if isinstance(group, str) else tuple(group)
            known = math.prod(sizes[m] for m in members if m in sizes)
            for member in members:
                sizes.setdefault(member, size // known)
            split = split.reshape_dim(len(names), [sizes[m] for m in members])
            names += members
        order = [m for group in dst for m in ((group,) if isinstance(group, str) else group)]
        moved = split.permute([names.index(m) for m in order])
        return moved.reshape([math.prod(sizes[m] for m in ((g,) if isinstance(g, str) else g)) for g in dst])

    @_from_05
    def select(self, dim: int, index: Any) -> NkiTensor:
        """One place of a dimension, known now or (a tensor or register) at run time."""
        if isinstance(index, int):
            return self[(slice(None),) * dim + (index,)]
        if self.is_indirect():
            raise self._fail("select", "at most one dynamic select")
        if dim == 0 and self.buffer.on_chip:
            raise self._fail("select", "a dynamic select that is not of the partition")
        indirect = Indirect(index, self.strides[dim], self.shape[dim], a_partition=False)
        shape, strides = [*self.shape], [*self.strides]
        del shape[dim], strides[dim]
        return self.with_layout(shape or (1,), strides or (1,), indirect_place=indirect)

    @_from_05
    def vector_select(self, dim: int, vector_offset: NkiTensor) -> NkiTensor:
        """A row for each partition, by an index in SBUF."""
        if dim != 0 or self.buffer.on_chip or self.is_indirect():
            raise self._fail("vector_select", "dimension 0 of a tensor in HBM, once")
        indirect = Indirect(vector_offset, self.strides[0], self.shape[0], a_partition=True)
        return self.with_layout((vector_offset.shape[0], *self.shape[1:]), self.strides, indirect_place=indirect)

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: Any = None,
        vector_offset: NkiTensor | None = None,
        indirect_dim: int = 0,
        dtype: str | None = None,
    ) -> NkiTensor:
        """An explicit `[[stride, count], ...]` over the storage; see `nki/deep-dives/nki-aps.rst`."""
        if settings.release is not None and not (self.is_contiguous() and self.size == self.extent):
            raise self._fail("ap", "a whole tensor: offsets on views differ between releases", self.get_pattern())
        cast = self if dtype is None or str(dtype) == self.dtype else self._recast(str(dtype))
        strides = tuple(int(step) for step, _ in pattern)
        shape = tuple(int(count) for _, count in pattern)
        indirect = None
        if scalar_offset is not None and vector_offset is not None:
            raise self._fail("ap", "scalar_offset or vector_offset, not both")
        if scalar_offset is not None or vector_offset is not None:
            # The stride is that of the tensor `ap` is called on, not the pattern's.
            stride = math.prod(self.shape[indirect_dim + 1 :])
            if vector_offset is not None and (indirect_dim != 0 or self.buffer.on_chip):
                raise self._fail("ap", "vector_offset along dimension 0 of a tensor in HBM")
            index = scalar_offset if vector_offset is None else vector_offset
            indirect = Indirect(index, stride, self.shape[indirect_dim], a_partition=vector_offset is not None)
        start = offset or 0
        narrow = math.prod(cast.shape[1:])
        if cast.buffer.on_chip and cast.dtype == self.dtype and narrow != cast.row and strides[0] == narrow:
            # On a slice the partition step may be the slice's own width, if it is dense (README.md).
            if not cast.is_contiguous():
                raise self._fail("ap", "a dense slice, for a pattern in its own width", self.get_pattern())
            start = start // narrow * cast.row + start % narrow
            strides = (cast.row, *strides[1:])
        view = cast.with_layout(shape, strides, cast.offset + start, indirect_place=indirect)
        if self.buffer.on_chip and shape[0] > 1 and strides[0] != view.row:
            rule = f"a partition step of the whole row ({view.row} elements)"
            raise ShapeError("nki.language.NkiTensor.ap", "pattern", rule, list(pattern))
        return view

    def view(self, dtype: str) -> NkiTensor:
        """The same bytes as another dtype; the last dimension changes its size."""
        old, new = self.itemsize, size_of(str(dtype))
        cast = self._recast(str(dtype))
        if old == new:
            return cast
        if self.strides[-1] != 1 or (self.shape[-1] * old) % new:
            raise self._fail("view", f"a dense last dimension of a multiple of {new} bytes", self.shape)
        outer = [stride * old // new for stride in self.strides[:-1]]
        return cast.with_layout((*self.shape[:-1], self.shape[-1] * old // new), (*outer, 1))

    reinterpret_cast = view

    def _recast(self, dtype: str) -> NkiTensor:
        old, new = self.itemsize, size_of(dtype)
        counts = (self.offset, self.row, self.extent)
        if any(count * old % new for count in counts):
            raise self._fail("view", f"a row and offset of whole {dtype}", self)
        offset, row, extent = (count * old // new for count in counts)
        return replace(self, dtype=dtype, offset=offset, row=row, extent=extent)


def _restride(shape: Sequence[int], strides: Sequence[int], new: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of `new` over the elements of (shape, strides), or None where only a copy could do it."""
    blocks: list[list[int]] = []  # [size, stride of its last element]
    for size, stride in zip(shape, strides, strict=True):
        if size == 1:
            continue
        if blocks and blocks[-1][1] == size * stride:
            blocks[-1] = [blocks[-1][0] * size, stride]
        else:
            blocks.append([size, stride])
    result: list[int] = []
    left, step = blocks.pop() if blocks else [1, 1]
    for size in reversed(new):
        if size == 1:
            result.append(step)
            continue
        if left == 1 and blocks:
            left, step = blocks.pop()
        if left % size:
            return None
        result.append(step)
        left, step = left // size, step * size
    return tuple(reversed(result))
