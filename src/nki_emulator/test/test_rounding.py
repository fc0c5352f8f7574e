"""Which format each of NKI's dtypes is, and how results are rounded to it."""

from __future__ import annotations

import numpy as np
import pytest

from nki_emulator.dtypes import NUMPY, narrow

INF, NAN = float("inf"), float("nan")
# float32 values, and what is stored of them: of a tie the even one.
ROUNDED: dict[str, tuple[list[float], list[float]]] = {
    "bfloat16": ([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-7], [1.0, 1 + 2.0**-6, 1 + 2.0**-7]),
    "tfloat32": ([1 + 2.0**-10, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 1 + 2.0**-12], [1 + 2.0**-10, 1.0, 1 + 2.0**-9, 1.0]),
    "float8_e4m3": ([-240, 247, 248, 1e4, 2.0**-10, 3 * 2.0**-10], [-240, 240, INF, INF, 0, 2.0**-8]),
    "uint8": ([0.5, 1.5, 2.5, -0.5, 300.0, -5.0, NAN], [0, 2, 2, 0, 255, 0, 0]),
    "int8": ([0.5, 1.5, -1.5, 300.0, -5.0, NAN], [0, 2, -2, 127, -5, 0]),
}


@pytest.mark.parametrize("dtype", ROUNDED)
def test_results_are_rounded_to_the_nearest(dtype: str) -> None:
    values, wanted = ROUNDED[dtype]
    assert narrow(np.array(values, np.float32), dtype).astype(np.float64).tolist() == wanted


def test_e4m3_of_trainium2_ends_at_240() -> None:
    """FP8_EXP4 is IEEE-754 (aws-neuron-sdk, Llama-3.1-405B tutorial): exponent 15 holds Inf and NaN, no numbers."""
    wide = np.arange(256, dtype=np.uint8).view(NUMPY["float8_e4m3"]).astype(np.float32)
    assert np.nanmax(wide[np.isfinite(wide)]) == 240
    assert np.isinf(wide[[0x78, 0xF8]]).all()
    assert np.isnan(wide[[*range(0x79, 0x80), *range(0xF9, 0x100)]]).all()
