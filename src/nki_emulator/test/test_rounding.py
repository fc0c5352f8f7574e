"""Rounding against tables made from the formats' definitions, not from the library that the emulator uses."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from fractions import Fraction

import numpy as np
import pytest

from nki_emulator.dtypes import NUMPY, narrow, widen


def values_of(exponent_bits: int, fraction_bits: int) -> dict[int, Fraction]:
    """Every finite positive code of an IEEE-754 format and its value: sign 0, the last exponent is Inf and NaN."""
    bias = 2 ** (exponent_bits - 1) - 1
    table = {}
    for exponent, fraction in itertools.product(range(2**exponent_bits - 1), range(2**fraction_bits)):
        share = Fraction(fraction, 2**fraction_bits)
        scale = Fraction(2) ** (max(exponent, 1) - bias)
        table[exponent << fraction_bits | fraction] = scale * (share + (1 if exponent else 0))
    return table


FORMATS = {"float8_e4m3": (4, 3), "float8_e5m2": (5, 2), "bfloat16": (8, 7), "float16": (5, 10)}


def nearest_even(value: Fraction, codes: list[int], numbers: list[Fraction], step: Fraction) -> int:
    """The code nearest to a positive value, ties to the even code; beyond half a step over the largest it is Inf."""
    if value >= numbers[-1] + step / 2:
        return codes[-1] + 1
    low = bisect_right(numbers, value) - 1
    if low + 1 == len(numbers):
        return codes[low]
    below, above = value - numbers[low], numbers[low + 1] - value
    if below == above:
        return codes[low] if codes[low] % 2 == 0 else codes[low + 1]
    return codes[low] if below < above else codes[low + 1]


@pytest.mark.parametrize("dtype", FORMATS)
def test_narrow_equals_the_table(dtype: str) -> None:
    table = values_of(*FORMATS[dtype])
    codes, numbers = list(table), list(table.values())
    step = numbers[-1] - numbers[-2]
    generator = np.random.default_rng(0)
    pick = sorted(generator.choice(len(numbers) - 1, min(len(numbers) - 1, 400), replace=False))
    probes = [numbers[-1], numbers[-1] + step / 2, numbers[-1] + step * 3 / 8, numbers[-1] * 4]
    for at in pick:  # each value, the middle to the next, and a little to either side of it
        middle = (numbers[at] + numbers[at + 1]) / 2
        probes += [numbers[at], middle, middle * Fraction(1025, 1024), middle * Fraction(1023, 1024)]
    top = Fraction(float(np.finfo(np.float32).max))
    inputs = np.array([float(p) for p in probes if p <= top], np.float32)
    wanted = [nearest_even(Fraction(float(v)), codes, numbers, step) for v in inputs]
    bits = {1: np.uint8, 2: np.uint16}[NUMPY[dtype].itemsize]
    got = narrow(inputs, dtype).view(bits)
    assert got.tolist() == wanted
    sign = 1 << (NUMPY[dtype].itemsize * 8 - 1)
    assert narrow(-inputs, dtype).view(bits).tolist() == [code | sign for code in wanted]


@pytest.mark.parametrize("dtype", FORMATS)
def test_widen_is_exact(dtype: str) -> None:
    table = values_of(*FORMATS[dtype])
    bits = {1: np.uint8, 2: np.uint16}[NUMPY[dtype].itemsize]
    stored = np.array(list(table), bits).view(NUMPY[dtype])
    assert widen(stored, dtype).tolist() == [float(v) for v in table.values()]


def test_e4m3_of_trainium2_ends_at_240() -> None:
    """FP8_EXP4 is IEEE-754 (aws-neuron-sdk, Llama-3.1-405B tutorial): exponent 15 holds Inf and NaN, no numbers."""
    codes = np.arange(256, dtype=np.uint8)
    wide = widen(codes.view(NUMPY["float8_e4m3"]), "float8_e4m3")
    assert np.nanmax(wide[np.isfinite(wide)]) == 240
    assert np.isinf(wide[[0x78, 0xF8]]).all()
    assert np.isnan(wide[[*range(0x79, 0x80), *range(0xF9, 0x100)]]).all()


def test_nan_stays_nan() -> None:
    nan = np.array([np.nan, -np.nan], np.float32)
    for dtype in FORMATS:
        assert np.isnan(widen(narrow(nan, dtype), dtype)).all()
    # A NaN whose set bits all fall off must not become Inf.
    low = np.array([0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(widen(narrow(low, "bfloat16"), "bfloat16")).all()


def test_integers_round_to_nearest_even_and_saturate() -> None:
    values = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 300.0, -5.0, np.nan], np.float32)
    assert narrow(values, "uint8").tolist() == [0, 2, 2, 0, 0, 255, 0, 0]
    assert narrow(values, "int8").tolist() == [0, 2, 2, 0, -2, 127, -5, 0]


def test_tfloat32_keeps_ten_bits() -> None:
    unit = np.float32(1)
    step = np.float32(2.0**-10)
    values = np.array([unit + step, unit + step / 2, unit + step * 3 / 2, unit + step / 4], np.float32)
    assert narrow(values, "tfloat32").tolist() == [1 + 2.0**-10, 1.0, 1 + 2.0**-9, 1.0]
