"""The stored counts of the decode step are those of the kernels as they are, and the schedule keeps its dependences."""

from __future__ import annotations

from dataclasses import replace

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from kimi_k2.nki import step_counts
from kimi_k2.nki.launch import Kernel
from kimi_k2.nki.limits import SBUF_PARTITION_BYTES
from kimi_k2.nki.rates import TRAINIUM2
from kimi_k2.nki.step import Stage, described, one_after_the_other, one_kernel, sbuf_bytes
from kimi_k2.nki.tensor import NkiTensor


@pytest.mark.parametrize(
    ("preset", "name"), [("trn2-tp64-ep1", "early"), ("trn2-tp32-ep2", "plain"), ("trn2-tp32-ep2", "early_fp8")]
)
def test_stored_counts_are_those_of_the_kernels(preset: str, name: str) -> None:
    """At 4,096 slots; `python -m kimi_k2.nki.step_counts` after a change of a kernel or a rate."""
    form, shape = step_counts.FORMS[name], step_counts.EXPERT_SHAPES[preset]
    stages = [*step_counts.attention_stages(4096, 1, form), step_counts.moe_stage(*shape, form)]
    layer = step_counts.stored()["presets"][preset][name]["4096"]
    assert described(stages, TRAINIUM2) == layer["kernels"]
    assert sbuf_bytes(stages) == layer["sbuf_bytes"]
    rates = replace(TRAINIUM2, dma_bytes_a_second=TRAINIUM2.dma_bytes_a_second * 0.8)
    assert one_kernel(stages, rates, 15e-6) * 1e6 == pytest.approx(
        layer["layer_us"]["one_kernel"]["80"]["15"], abs=0.01
    )


def test_every_layer_fits_sbuf_and_gains_by_running_ahead() -> None:
    for forms in step_counts.stored()["presets"].values():
        for layer in (layer for contexts in forms.values() for layer in contexts.values()):
            assert layer["sbuf_bytes"] < SBUF_PARTITION_BYTES
            for efficiency, row in layer["layer_us"]["one_kernel"].items():
                in_turn = layer["layer_us"]["kernels_in_turn"][efficiency]
                assert all(in_turn[latency] > time > float(latency) * 3 for latency, time in row.items())


def _stage(loads: int) -> Stage:
    """A kernel that loads weights, multiplies its input with each, and stores one of the results."""

    @nki.jit
    def kernel(data: NkiTensor, weights: NkiTensor) -> NkiTensor:
        out = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
        tiles = [nl.load(weights[number]) for number in range(loads)]
        tile = nl.load(data)
        for weight in tiles:
            nisa.tensor_tensor(tile, tile, weight, nl.multiply)
        nisa.dma_copy(out, tile)
        return out

    assert isinstance(kernel, Kernel)
    two = kernel[2]
    two(np.zeros((128, 64), np.float32), np.zeros((loads, 128, 64), np.float32))
    return Stage("kernel", two, (0,), "all-reduce")


def test_a_prologue_hides_behind_the_collective_and_the_rest_does_not() -> None:
    stage = _stage(200)
    alone, latency = stage.cost(TRAINIUM2).span, 200e-6
    assert one_after_the_other([stage], TRAINIUM2, latency) == pytest.approx(alone + latency)
    loads = 200 * 128 * (256 + 512) / 368e9
    hidden = one_after_the_other([stage], TRAINIUM2, latency) - one_kernel([stage], TRAINIUM2, latency)
    assert hidden == pytest.approx(loads, rel=0.05)  # all of the weights, and nothing else
    # With a collective that is too short the DMA engines set the pace.
    assert one_kernel([stage], TRAINIUM2, 1e-6) > loads
