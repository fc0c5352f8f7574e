"""What instructions compute, against NumPy in float64, and what a kernel's memories hold."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from nki_emulator.tensor import NkiTensor

from .tiles import on_tiles, stored

RELEASE = None  # kernels that show what the emulator takes

RNG = np.random.default_rng(0)


def draw(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def test_double_row_contracts_256() -> None:
    def body(left: NkiTensor, right: NkiTensor) -> NkiTensor:
        total = nl.ndarray((32, 16), dtype=nl.float32, buffer=nl.psum)
        nisa.nc_matmul(total, left, right, perf_mode=nisa.matmul_perf_mode.double_row)
        return total

    left, right = (draw(128, 2, n).astype(ml_dtypes.float8_e4m3) for n in (32, 16))
    wanted = np.einsum("ksm,ksn->mn", left.astype(np.float64), right.astype(np.float64))
    assert np.abs(on_tiles(body, left, right) - wanted).max() < 1e-4


def test_both_cores_may_store_the_same_values() -> None:
    data = draw(128, 16)
    assert np.array_equal(nki.jit(lambda data: stored(nl.load(data)))[2](data), data)


def test_tiles_at_one_address_share_their_memory() -> None:
    def body(data: NkiTensor) -> NkiTensor:
        first = nl.ndarray((128, 16), dtype=nl.float32, address=(0, 1024))
        nisa.tensor_copy(first, data)
        again = first.view(nl.uint32)
        nisa.tensor_scalar(again, again, nl.bitwise_and, 0x7FFFFFFF)
        return first

    data = draw(128, 16)
    assert np.array_equal(on_tiles(body, data), np.abs(data))


def test_a_pattern_on_a_slice_may_count_in_its_width() -> None:
    def body(data: NkiTensor) -> NkiTensor:
        copy = nl.ndarray((64, 8), dtype=nl.float32)
        nisa.tensor_copy(copy, data[:, 16:32].ap(pattern=[[16, 64], [1, 8]], offset=4))
        return copy

    data = draw(64, 48)
    assert np.array_equal(on_tiles(body, data), data[:, 20:28])


def test_search_instructions_break_ties_as_documented() -> None:
    def body(data: NkiTensor, wanted: NkiTensor) -> tuple[NkiTensor, NkiTensor]:
        found, replaced = (nl.ndarray((1, 8), dtype=nl.uint32) for _ in range(2))
        nisa.nc_find_index8(found, data, wanted)
        nisa.nc_match_replace8(data, data, wanted, -1.0, dst_idx=replaced)
        return found, replaced

    data = np.array([[1, 2, 3, 4, 8, 8, 8, 8, 8, 8, 8]], np.float32)
    found, replaced = on_tiles(body, data, np.array([[3, 8, 8, 8, 8, 8, 8, 8]], np.float32))
    assert found.tolist() == [[2, 4, 5, 6, 7, 8, 9, 10]]
    assert replaced.tolist() == [[2, 10, 9, 8, 7, 6, 5, 4]]  # the example of nki.isa.nc_match_replace8


def test_bn_statistics_are_mean_and_variance() -> None:
    def body(data: NkiTensor) -> NkiTensor:
        stats, result = nl.ndarray((128, 2, 6), dtype=nl.float32), nl.ndarray((128, 2), dtype=nl.float32)
        for half in range(2):
            nisa.bn_stats(stats[:, half], data[:, half * 300 : (half + 1) * 300])
        nisa.bn_aggr(result, stats)
        return result

    data = draw(128, 600)
    assert np.abs(on_tiles(body, data) - np.stack((data.mean(1), data.var(1)), 1)).max() < 1e-6


def test_registers_drive_loops_and_addresses() -> None:
    @nki.jit
    def kernel(data: NkiTensor, count: NkiTensor) -> NkiTensor:
        out = stored(nl.zeros((1, 8), dtype=nl.float32))
        register = nisa.register_alloc()
        nisa.register_load(register, nl.load(count))

        def body(i: Any) -> None:
            scalar = nl.ndarray((1, 1), dtype=nl.float32)
            nisa.dma_copy(scalar, data.ap([[1, 1], [1, 1]], scalar_offset=i, indirect_dim=1))
            nisa.dma_copy(out.ap([[1, 1], [1, 1]], scalar_offset=i, indirect_dim=1), scalar)

        nl.fori_loop(0, register, body)
        return out

    data = draw(1, 8)
    got = kernel(data, np.array([[5]], np.int32))
    assert np.array_equal(got, np.where(np.arange(8) < 5, data, 0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3", "float8_e5m2", "float16"])
def test_a_copy_through_sbuf_is_bit_for_bit(dtype: str) -> None:
    def body(data: NkiTensor) -> NkiTensor:
        copy = nl.ndarray((128, 64), dtype=data.dtype)
        nisa.tensor_copy(copy, data)
        return copy

    data = RNG.integers(0, 256, 128 * 64 * np.dtype(dtype).itemsize, dtype=np.uint8).view(dtype).reshape(128, 64)
    assert on_tiles(body, data).tobytes() == data.tobytes()
