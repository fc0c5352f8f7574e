"""Arrays through the emulator's SBUF."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nki
import nki.isa as nisa
import nki.language as nl


def stored(tile: Any) -> Any:
    """A tile in SBUF or PSUM as a result in HBM."""
    out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    if tile.buffer is nl.psum:
        tile, in_psum = nl.ndarray(tile.shape, dtype=tile.dtype), tile
        nisa.tensor_copy(tile, in_psum)
    nl.store(out, tile)
    return out


def on_tiles(body: Callable[..., Any], *arrays: Any) -> Any:
    """What `body` makes of tiles with the arrays' values: a tile, or several."""

    @nki.jit
    def kernel(inputs: tuple[Any, ...]) -> Any:
        result = body(*(nl.load(data) for data in inputs))
        return tuple(map(stored, result)) if isinstance(result, tuple) else stored(result)

    return kernel(arrays)
