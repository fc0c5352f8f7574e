"""Constants of `nki.isa`."""

from __future__ import annotations

from enum import Enum, IntEnum


class engine(Enum):  # noqa: N801 - NKI's name, like those below
    """Engines of a NeuronCore."""

    unknown = 0
    tensor = 1
    scalar = 2
    gpsimd = 3
    dma = 4
    vector = 5
    sync = 6


class reduce_cmd(Enum):  # noqa: N801
    """What an instruction does with its engine's accumulators."""

    idle = 0
    reset = 1
    reduce = 2
    reset_reduce = 3
    load_reduce = 4


class dge_mode(Enum):  # noqa: N801
    """Who generates DMA descriptors."""

    unknown = 0
    swdge = 1
    hwdge = 2
    none = 3


class oob_mode(Enum):  # noqa: N801
    """What an index out of bounds does."""

    error = 0
    skip = 1


class matmul_perf_mode(Enum):  # noqa: N801
    """Performance mode of a matmul."""

    none = "none"
    double_row = "double_row"


class nc_version(IntEnum):  # noqa: N801
    """Generation of NeuronCore."""

    gen2 = 2
    gen3 = 3
    gen4 = 4


class dma_engine(Enum):  # noqa: N801
    """Which DMA engines `sendrecv` uses."""

    dma = 1
    gpsimd_dma = 2


tensor_engine, vector_engine, scalar_engine = engine.tensor, engine.vector, engine.scalar
gpsimd_engine, unknown_engine = engine.gpsimd, engine.unknown
