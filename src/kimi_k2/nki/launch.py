"""Run a kernel: one or two cores (LNC), their meetings, and what is checked when it has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kimi_k2.nki.core import Core, Instruction, current, enter, inside_kernel
from kimi_k2.nki.dtypes import NUMPY, Array, name_of
from kimi_k2.nki.errors import CapacityError, DeadlockError, NkiError, UnwrittenError
from kimi_k2.nki.settings import settings
from kimi_k2.nki.storage import ALONE, CAPACITY, Region, Storage
from kimi_k2.nki.tensor import NkiTensor, row_major


class _Aborted(BaseException):
    """Ends a core whose partner has failed."""


class Launch:
    """One run of a kernel on `cores` cores.

    Cores take turns: one runs until it has to wait for the other, so that a run is the same every time.

    Attributes:
        traces: instructions of each core, when it has ended.
        races: accesses that raced, where settings allow them.
        unwritten: reads of memory that nothing has written, where settings allow them.
        arguments: storage of each positional argument, None for one that is no tensor.
        results: storages of the results.
        spilled: bytes a partition beyond the capacity, at the worst moment, where settings allow them.
    """

    def __init__(self, cores: int) -> None:
        if cores not in (1, 2):
            raise NkiError("nki.jit", "grid", "1 or 2 cores (LNC)", cores)
        self.cores = cores
        self.races = self.spilled = self.unwritten = 0
        self.traces: list[list[Instruction]] = []
        self.shared: list[NkiTensor] = []
        self.arguments: list[int | None] = []
        self.results: list[int] = []
        self._turns = [threading.Semaphore(0) for _ in range(cores)]
        self._posted: dict[tuple[Any, ...], dict[int, Any]] = {}
        self._counts: dict[tuple[Any, ...], int] = {}
        self._ended = [False] * cores
        self._failure: BaseException | None = None

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The kernel's results, of core 0."""
        results: list[Any] = [None] * self.cores
        cores = [Core(number, self) for number in range(self.cores)]

        def work(number: int) -> None:
            self._turns[number].acquire()
            enter(cores[number])
            try:
                if self._failure is None:
                    results[number] = function(*args, **kwargs)
                    check_capacity(cores[number])
            except _Aborted:
                pass
            except BaseException as error:
                self._failure = self._failure or error
            finally:
                enter(None)
                self._ended[number] = True
                if self.cores == 2:
                    self._turns[1 - number].release()

        threads = [threading.Thread(target=work, args=(number,)) for number in range(self.cores)]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join()
        self.traces = [core.instructions for core in cores]
        if self._failure is not None:
            raise self._failure
        return results[0]

    def meet(self, key: tuple[Any, ...], payload: Any = None) -> tuple[Any, bool]:
        """Wait for the other core at the same meeting; returns (what it brought, whether this one came last)."""
        me = current().number
        turn = self._counts.setdefault((me, *key), 0)
        self._counts[(me, *key)] = turn + 1
        slot = self._posted.setdefault((*key, turn), {})
        slot[me] = payload
        last = 1 - me in slot
        while 1 - me not in slot:
            if self._ended[1 - me]:
                raise DeadlockError(
                    f"nki.isa.{key[0]}", "core", f"core {1 - me} comes to the same {key[0]}", "it has ended"
                )
            self._turns[1 - me].release()
            self._turns[me].acquire()
            if self._failure is not None:
                raise _Aborted
            if 1 - me not in slot and not self._ended[1 - me]:
                # The other gave the turn back to wait for something else.
                raise DeadlockError(
                    f"nki.isa.{key[0]}", "core", f"core {1 - me} comes to the same {key}", "it waits for another"
                )
        return slot[1 - me], last


def check_capacity(core: Core) -> None:
    """Raise CapacityError where the tiles alive at once exceed SBUF or PSUM.

    A tile lives from the first to the last instruction that touches it. The compiler may need more than that (it does
    not reorder tiles for free), never less without spilling.
    """
    for region, capacity in CAPACITY.items():
        events: dict[int, int] = {}
        for tile in core.tiles:
            if tile.region is region and tile.first >= 0:
                events[tile.first] = events.get(tile.first, 0) + tile.nbytes
                events[tile.last + 1] = events.get(tile.last + 1, 0) - tile.nbytes
        alive = 0
        for at in sorted(events):
            alive += events[at]
            if alive > capacity and settings.spills_allowed:
                core.launch.spilled = max(core.launch.spilled, alive - capacity)
            elif alive > capacity:
                largest = sorted(
                    (t for t in core.tiles if t.region is region and t.first <= at <= t.last), key=lambda t: -t.nbytes
                )[:3]
                names = ", ".join(f"{t.name or 'a tile'} {t.nbytes}" for t in largest)
                operation = core.instructions[min(at, len(core.instructions)) - 1].operation
                rule = f"tiles alive at once take at most {capacity} bytes a partition of {region.value}"
                raise CapacityError(f"nki.isa.{operation}", region.value, rule, f"{alive} (largest: {names})")


def argument(value: Any, region: Region) -> Any:
    """A kernel's argument: arrays become tensors in HBM (written through, so that kernels can change them)."""
    array = as_array(value)
    if array is None:
        return value
    dtype = name_of(array.dtype)
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    shape = array.shape or (1,)
    storage = Storage(region, array.nbytes, data=array.reshape(-1).view(np.uint8))
    return NkiTensor(
        storage, dtype, shape, row_major(shape), 0, 0, 0, array.size, region, "argument", mark=ALONE, tile=-1
    )


def as_array(value: Any) -> Array | None:
    """NumPy form of an array or of a torch tensor (sharing memory); None for anything else."""
    if isinstance(value, np.ndarray):
        return value
    if type(value).__module__.startswith("torch") and hasattr(value, "element_size"):
        import torch

        value = value.detach().contiguous()
        name = str(value.dtype).removeprefix("torch.")
        same_width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(value.element_size())
        if name in NUMPY and same_width is not None:
            array: Array = value.view(same_width).numpy().view(NUMPY[name])
            return array
        plain: Array = value.numpy()
        return plain
    return None


def result(value: Any) -> Any:
    """A kernel's result as NumPy, in the shape that the kernel returns it."""
    if isinstance(value, NkiTensor):
        written = value.storage.written
        if written is not None and not written.all() and not settings.unwritten_allowed:
            rule = "every element of a result is written"
            share = float(np.count_nonzero(written) / written.size)
            raise UnwrittenError("nki.jit", value.name or "result", rule, f"{value}, {share:.1%} written")
        start = value.base + value.offset * value.itemsize
        steps = [stride * value.itemsize for stride in value.strides]
        return np.ndarray(value.shape, NUMPY[value.dtype], value.storage.data, start, steps).copy()
    if isinstance(value, list | tuple):
        return type(value)(result(part) for part in value)
    if isinstance(value, dict):
        return {name: result(part) for name, part in value.items()}
    return value


class Kernel:
    """What `nki.jit` makes of a function: `kernel(...)` runs it on one core, `kernel[2](...)` on two.

    Attributes:
        last: the latest launch, whose traces the cost model reads.
    """

    def __init__(self, function: Callable[..., Any], cores: int = 1) -> None:
        self.function = function
        self.cores = cores
        self.__name__ = getattr(function, "__name__", "kernel")
        self.__doc__ = function.__doc__
        self.__wrapped__ = function
        self.last: Launch | None = None

    def __getitem__(self, grid: Any) -> Kernel:
        cores = grid[-1] if isinstance(grid, tuple) else grid
        return Kernel(self.function, int(cores))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel; arrays and torch tensors become tensors in HBM, results NumPy arrays."""
        if inside_kernel():
            return self.function(*args, **kwargs)
        region = Region.shared_hbm if self.cores > 1 else Region.private_hbm
        seen: dict[int, Any] = {}

        def once(value: Any) -> Any:
            if id(value) not in seen:
                seen[id(value)] = argument(value, region)
            return seen[id(value)]

        launch = self.last = Launch(self.cores)
        tensors = tuple(map(once, args))
        out = launch.run(self.function, tensors, {name: once(v) for name, v in kwargs.items()})
        launch.arguments = [part.storage.number if isinstance(part, NkiTensor) else None for part in tensors]
        parts = out if isinstance(out, list | tuple) else [out]
        launch.results = [part.storage.number for part in parts if isinstance(part, NkiTensor)]
        return result(out)
