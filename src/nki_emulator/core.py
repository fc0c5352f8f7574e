"""A NeuronCore while a kernel runs on it: its memories, engine registers and the instructions that it has seen."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nki_emulator.dtypes import size_of
from nki_emulator.errors import NkiError
from nki_emulator.limits import PARTITIONS
from nki_emulator.storage import ALONE, CAPACITY, Region, Storage


@dataclass(frozen=True)
class Access:
    """A box of a storage that an instruction reads or writes: bytes first..last of partitions low..high (exclusive).

    Attributes:
        written: by the instruction.
        operand: name of the argument.
        dtype, free_size, partitions: of the view.
        run: bytes that follow one another, the longest such piece.
    """

    storage: int
    region: Region
    low: int
    high: int
    first: int
    last: int
    written: bool
    operand: str
    dtype: str
    free_size: int
    partitions: int
    run: int

    @property
    def nbytes(self) -> int:
        """Bytes moved."""
        return self.free_size * self.partitions * size_of(self.dtype)

    def overlaps(self, other: Access) -> bool:
        """Whether the boxes share a byte."""
        return (
            self.storage == other.storage
            and self.low < other.high
            and other.low < self.high
            and self.first < other.last
            and other.first < self.last
        )


@dataclass
class Instruction:
    """One `nki.isa` call as it ran."""

    operation: str
    engine: str
    accesses: list[Access] = field(default_factory=list)
    # What the cost of the operation depends on beside its operands.
    details: dict[str, Any] = field(default_factory=dict)


@dataclass
class Tile:
    """Life of one tile that the compiler places: bytes a partition, first and last instruction that touches it."""

    region: Region
    nbytes: int
    name: str
    first: int = -1
    last: int = -1


class Core:
    """One core of a launch.

    Args:
        number: `nl.program_id`.
        launch: the launch that it belongs to.
    """

    def __init__(self, number: int, launch: Any) -> None:
        self.number = number
        self.launch = launch
        self.instructions: list[Instruction] = []
        self.tiles: list[Tile] = []
        self.shared_made = 0
        self._physical: dict[Region, Storage] = {}
        self._marks = itertools.cycle(range(1, ALONE))
        # Accumulators of the Scalar and the Vector Engine, one a partition; None: undefined.
        self.registers: dict[str, Any] = {"scalar": None, "vector": None}

    def physical(self, region: Region) -> Storage:
        """All of SBUF or PSUM, for tiles with addresses."""
        if region not in self._physical:
            self._physical[region] = Storage(region, PARTITIONS * CAPACITY[region], CAPACITY[region])
        return self._physical[region]

    def next_mark(self) -> int:
        """A mark for what the next tile with an address writes; 254 of them, in turn."""
        return next(self._marks)

    def accumulator(self, engine: str, initial: float) -> Any:
        """A fresh accumulator register of every partition."""
        self.registers[engine] = np.full((PARTITIONS, 1), initial, np.float32)
        return self.registers[engine]


_local = threading.local()


def current() -> Core:
    """The core that the calling thread emulates."""
    core = getattr(_local, "core", None)
    if core is None:
        raise NkiError("nki", "call", "operations run inside a kernel only")
    return core  # type: ignore[no-any-return]


def enter(core: Core | None) -> None:
    """Make the calling thread a core (or none)."""
    _local.core = core


def inside_kernel() -> bool:
    """Whether the calling thread runs a kernel."""
    return getattr(_local, "core", None) is not None
