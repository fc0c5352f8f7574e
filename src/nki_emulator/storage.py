"""Memories: HBM, SBUF and PSUM as bytes, each with a map of what was written and by which tile."""

from __future__ import annotations

import itertools
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nki_emulator.limits import PSUM_PARTITION_BYTES, SBUF_PARTITION_BYTES

Bytes = NDArray[np.uint8]


class Region(Enum):
    """Where a tensor lies (`nl.MemoryRegion`)."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"

    @property
    def on_chip(self) -> bool:
        """SBUF or PSUM, which have partitions."""
        return self in (Region.sbuf, Region.psum)


CAPACITY = {Region.sbuf: SBUF_PARTITION_BYTES, Region.psum: PSUM_PARTITION_BYTES}
# Marks bytes of tiles that share their memory with no other tile.
ALONE = 255
# What unwritten bytes hold: NaN in every float dtype, -1 or the largest value in integers.
POISON = 0xFF
_numbers = itertools.count()


class Storage:
    """The bytes of one allocation, or all of SBUF or PSUM where tiles have addresses.

    Args:
        region: the memory.
        nbytes: size in bytes.
        pitch: bytes from one partition to the next; 0 in HBM.
        data: uint8, one-dimensional, already written (an argument of the kernel), or None.
    """

    def __init__(self, region: Region, nbytes: int, pitch: int = 0, data: Bytes | None = None) -> None:
        self.number = next(_numbers)
        self.region = region
        self.pitch = pitch
        self.data: Bytes = np.full(nbytes, POISON, np.uint8) if data is None else data
        # 0: nothing has written this byte; otherwise the mark of the tile that has. None: all of it is written.
        self.written: Bytes | None = np.zeros(nbytes, np.uint8) if data is None else None
        # Elements of PSUM that a matmul has written, by the mark of the tile.
        self.accumulated: Bytes | None = None
        # By core: (written, where) since the last barrier over this memory.
        self.touched: dict[int, list[tuple[bool, NDArray[Any]]]] = {}
