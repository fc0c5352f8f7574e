"""Run a kernel: one or two cores (LNC), their meetings, and what is checked when it has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nki_emulator.core import Core, Instruction, current, enter, inside_kernel
from nki_emulator.dtypes import NUMPY, Array, name_of
from nki_emulator.errors import CapacityError, DeadlockError, NkiError, PlaceError, UnwrittenError
from nki_emulator.ranks import Ranks
from nki_emulator.settings import before, settings
from nki_emulator.storage import CAPACITY, Region, Storage
from nki_emulator.tensor import NkiTensor


class Launch:
    """One run of a kernel on `cores` cores of one rank.

    Args:
        cores: 1 or 2.
        ranks: all that run it together; by default this one alone.
        rank: which of them this is.

    Attributes:
        traces: instructions of each core, when it has ended.
        arguments: storage of each positional argument, None for one that is no tensor.
        results: storages of the results.
        most: bytes a partition of tiles alive at once, at most, of SBUF and of PSUM.
    """

    def __init__(self, cores: int, ranks: Ranks | None = None, rank: int = 0) -> None:
        if cores not in (1, 2):
            raise NkiError("nki.jit", "grid", "1 or 2 cores (LNC)", cores)
        self.cores, self.rank = cores, rank
        self.ranks = ranks or Ranks(1, cores)
        self.traces: list[list[Instruction]] = []
        self.shared: list[NkiTensor] = []
        self.arguments: list[int | None] = []
        self.results: list[int] = []
        self.most = dict.fromkeys(CAPACITY, 0)
        self.threads: list[threading.Thread] = []
        self._returned: list[Any] = [None] * cores

    def begin(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Start the cores; they run when it is their turn."""
        cores = [Core(number, self) for number in range(self.cores)]
        self.traces = [core.instructions for core in cores]
        turns = self.ranks.turns

        def work(number: int) -> None:
            turn = self.ranks.place(self.rank, number)
            turns.enter(turn)
            enter(cores[number])
            try:
                if turns.failure is None:
                    self._returned[number] = function(*args, **kwargs)
                    check_capacity(cores[number])
            except BaseException as error:  # of several the first, for which others wait in vain
                turns.failure = turns.failure or error
            finally:
                enter(None)
                turns.end(turn)

        self.threads = [threading.Thread(target=work, args=(number,)) for number in range(self.cores)]
        for thread in self.threads:
            thread.start()

    def end(self) -> Any:
        """The kernel's results, of core 0, when the cores have ended."""
        if self.ranks.turns.failure is not None:
            raise self.ranks.turns.failure
        return self._returned[0]

    def meet(self, key: tuple[Any, ...], payload: Any = None) -> tuple[Any, bool]:
        """Wait for the other core at the same meeting; returns (what it brought, whether this one came last)."""
        me, turns = current().number, self.ranks.turns
        brought = turns.meet(self.ranks.place(self.rank, me), (self.rank, "cores", *key), me, 2, payload)
        if brought is None:
            ended = turns.has_ended(self.ranks.place(self.rank, 1 - me))
            state = "it has ended" if ended else "it waits for another"
            raise DeadlockError(f"nki.isa.{key[0]}", "core", f"core {1 - me} comes to the same {key[0]}", state)
        return brought[1 - me], [*brought][1] == me


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
            core.launch.most[region] = max(core.launch.most[region], alive)
            if alive > capacity and not settings.spills_allowed:
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
    storage = Storage(region, array.nbytes, data=array.reshape(-1).view(np.uint8))
    return NkiTensor.whole(storage, dtype, array.shape or (1,), "argument")


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
        if settings.release is not None and value.buffer is not Region.shared_hbm:
            raise PlaceError("nki.jit", value.name or "result", "a result in nl.shared_hbm", value.buffer.value)
        written = value.storage.written
        if written is not None and not written.all() and not settings.unwritten_allowed:
            rule = "every element of a result is written"
            share = float(np.count_nonzero(written) / written.size)
            raise UnwrittenError("nki.jit", value.name or "result", rule, f"{value}, {share:.1%} written")
        start = value.base + value.offset * value.itemsize
        steps = [stride * value.itemsize for stride in value.strides]
        return np.ndarray(value.shape, NUMPY[value.dtype], value.storage.data, start, steps).copy()
    if isinstance(value, list | tuple):
        return type(value)(result(item) for item in value)
    if isinstance(value, dict):
        return {name: result(item) for name, item in value.items()}
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
        return self.run(Ranks(1, self.cores), {0: args}, kwargs)[0]

    def run(self, ranks: Ranks, arguments: Mapping[int, Sequence[Any]], named: Mapping[str, Any]) -> list[Any]:
        """Run the kernel on ranks at once, each with its positional arguments; `last` is the first one's launch."""
        begun = [self._begin(ranks, rank, mine, named) for rank, mine in arguments.items()]
        self.last = begun[0][0]
        ranks.turns.begin()
        for launch, _ in begun:
            for thread in launch.threads:
                thread.join()
        return [self._end(*call) for call in begun]

    def _begin(
        self, ranks: Ranks, rank: int, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Launch, tuple[Any, ...]]:
        """A launch on one of several ranks, and its positional arguments as tensors."""
        region = Region.shared_hbm if self.cores > 1 else Region.private_hbm
        seen: dict[int, Any] = {}

        def once(value: Any) -> Any:
            if before("0.7") and (isinstance(value, list) or hasattr(value, "_fields")):
                raise NkiError("nki.jit", "argument", "tuples, no lists and named tuples", type(value).__name__)
            if isinstance(value, list | tuple):
                values = [once(item) for item in value]
                return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
            if id(value) not in seen:
                seen[id(value)] = argument(value, region)
            return seen[id(value)]

        launch = Launch(self.cores, ranks, rank)
        tensors = tuple(map(once, args))
        launch.begin(self.function, tensors, {name: once(value) for name, value in kwargs.items()})
        return launch, tensors

    def _end(self, launch: Launch, tensors: tuple[Any, ...]) -> Any:
        """The results of a launch that has ended."""
        out = launch.end()
        launch.arguments = [tensor.storage.number if isinstance(tensor, NkiTensor) else None for tensor in tensors]
        results = out if isinstance(out, list | tuple) else [out]
        launch.results = [tensor.storage.number for tensor in results if isinstance(tensor, NkiTensor)]
        return result(out)
