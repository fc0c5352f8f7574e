"""The cost model counts what a kernel moves; `test_step.py` has its schedule."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from nki_emulator.cost import Cost, cost_of
from nki_emulator.launch import Kernel
from nki_emulator.rates import Rates
from nki_emulator.tensor import NkiTensor

RELEASE = None  # kernels that show what the emulator takes


def costed(body: object, *arrays: object, rates: Rates | None = None) -> Cost:
    kernel = nki.jit(body)
    assert isinstance(kernel, Kernel)
    kernel(*arrays)
    return cost_of(kernel, rates or Rates())


def test_bytes_and_descriptors_of_a_dma() -> None:
    def rows(data: NkiTensor) -> None:
        nisa.dma_copy(nl.ndarray((128, 1024), dtype=nl.float32), data)

    def columns(data: NkiTensor) -> None:
        nisa.dma_copy(nl.ndarray((128, 128), dtype=nl.float32), data[:, 0:128].permute((1, 0)))

    data = np.zeros((128, 1024), np.float32)
    whole, turned = costed(rows, data), costed(columns, data)
    assert (whole.hbm_bytes, whole.descriptors) == (128 * 4096, 128)  # one run a partition
    assert (turned.hbm_bytes, turned.descriptors) == (128 * 512, 128 * 128)  # one run an element
    rates = Rates(descriptor_bytes=0)
    assert costed(rows, data, rates=rates).busy["dma"] == pytest.approx(128 * 4096 / 368e9)


@pytest.mark.parametrize(
    ("dtype", "passes", "hint"), [("bfloat16", 1, False), ("float32", 4, False), ("float32", 2, True)]
)
def test_a_matmul_takes_its_columns(dtype: str, passes: int, hint: bool) -> None:
    def kernel(left: NkiTensor, right: NkiTensor) -> None:
        a, b = nl.load(left), nl.load(right)
        for columns in (512, 8):
            out = nl.ndarray((64, columns), dtype=nl.float32, buffer=nl.psum)
            nisa.nc_matmul(out, a, b[:, 0:columns], is_stationary_onezero=hint)

    left, right = (np.zeros((128, n), dtype) for n in (64, 512))
    cost = costed(kernel, left, right)
    assert cost.busy["tensor"] == pytest.approx((512 + 64) * passes / 2.4e9)
