"""The stored counts of the decode step are those of the kernels as they are, and the schedule keeps its dependences."""

from __future__ import annotations

import os
from typing import Any

import nki
import nki.collectives as ncc
import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

from kimi_k2.nki import step_counts
from kimi_k2.nki.step import Layers, at, described
from nki_emulator.launch import Kernel
from nki_emulator.rates import TRAINIUM2
from nki_emulator.schedule import critical_path, ends_of
from nki_emulator.tensor import NkiTensor

WHOLE_LAYERS = [(preset, name) for name in ("folded", "folded_4") for preset in step_counts.PRESETS]
RELEASE = None  # kernels that show what the emulator takes


@pytest.mark.parametrize(("preset", "name"), WHOLE_LAYERS if os.environ.get("KIMI_K2_SLOW") else WHOLE_LAYERS[:1])
def test_stored_counts_are_those_of_the_whole_layer_kernel(preset: str, name: str) -> None:
    stored = step_counts.stored()["presets"][preset][name]["4096"]
    form = step_counts.FORMS[name]
    layers = step_counts.whole_layers(4096, 1, step_counts.expert_shape(preset, form), form)
    found = described(layers.counts(TRAINIUM2))
    assert {name: stored[name] for name in found} == found
    assert layers.sbuf_bytes() == stored["sbuf_bytes"]
    rates = at(TRAINIUM2, 80, 15)
    assert layers.seconds(rates) * 1e6 == pytest.approx(stored["layer_us"]["80"]["15"], abs=0.01)
    assert sum(layers.path(rates).values()) == pytest.approx(layers.seconds(rates))


@nki.jit
def kernel(data: NkiTensor, weights: NkiTensor, waits: bool) -> NkiTensor:
    """Sums over ranks, three times, with a layer's weights in between; loaded before the sum, or behind its result."""
    out = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.shared_hbm)
    tile = nl.load(data)
    for layer in range(3):
        total = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
        ncc.all_reduce(srcs=[tile], dsts=[total], replica_group=ncc.ReplicaGroup([[0]]), op=nl.add)
        tiles = []
        for number in range(weights.shape[1]):
            weight = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
            if waits:
                nisa.tensor_copy(weight, total)  # the load overwrites it, and so comes behind the sum
            nisa.dma_copy(weight, weights[layer, number])
            tiles.append(weight)
        for weight in tiles:
            nisa.tensor_tensor(total, total, weight, nl.multiply)
        tile = total
    nisa.dma_copy(out, tile)
    return out


LOADS = 200
SECONDS_OF_LOADS = LOADS * 128 * (256 + 512) / 368e9


def _layers(waits: bool) -> Layers:
    assert isinstance(kernel, Kernel)
    one = kernel[1]
    one(np.zeros((128, 64), np.float32), np.zeros((3, LOADS, 128, 64), np.float32), waits)
    return Layers(one, ("all-reduce",))


def test_loads_hide_behind_a_collective_unless_they_wait_for_it() -> None:
    rates, loads = at(TRAINIUM2, 100, 200), SECONDS_OF_LOADS
    assert loads < 200e-6
    hidden, exposed = _layers(False).seconds(rates), _layers(True).seconds(rates)
    assert hidden == pytest.approx(200e-6 + LOADS * 128 / 0.96e9, rel=0.02)  # the collective, and the products
    assert exposed > 200e-6 + loads
    # With a collective that is too short the DMA engines set the pace.
    assert _layers(False).seconds(at(TRAINIUM2, 100, 1)) == pytest.approx(loads, rel=0.1)


def test_the_critical_path_names_what_a_layer_waits_for() -> None:
    path = _layers(False).path(at(TRAINIUM2, 100, 200))
    assert path["collective"] == pytest.approx(200e-6)
    assert path["vector"] == pytest.approx(LOADS * 128 / 0.96e9, rel=0.05)
    assert path.get("dma", 0.0) == 0
    path = _layers(False).path(at(TRAINIUM2, 100, 1))
    assert path["dma"] > 0.8 * SECONDS_OF_LOADS


def test_rings_share_the_dma_engines() -> None:
    """A small store passes a long row of loads at half the rate, and does not wait for them all."""

    @nki.jit
    def both(data: NkiTensor) -> Any:
        out = nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.shared_hbm)
        made = nl.zeros((128, 512), dtype=nl.float32)
        for number in range(20):
            nisa.dma_copy(nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.sbuf), data[number])
        nisa.dma_copy(out, made)
        return out

    assert isinstance(both, Kernel)
    both(np.zeros((20, 128, 512), np.float32))
    assert both.last is not None
    trace = both.last.traces[0]
    ends = ends_of(trace, TRAINIUM2)
    one = 128 * (2048 + 512) / 368e9
    assert ends[-1] == pytest.approx(512 / 0.96e9 + 2 * one + 1.3e-6, rel=0.05)
    assert max(ends) == pytest.approx(21 * one + 1.3e-6, rel=0.01)  # the engines are never idle
    assert set(critical_path(trace, TRAINIUM2, len(trace) - 1, 0)) <= {"dma", "dma latency", "vector", "gpsimd"}
