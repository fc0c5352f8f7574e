"""Tuned launches of linears beside all others. Needs a Hopper GPU with tuning files, nvcc, and the card to itself."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from itertools import product

import pytest
import torch
from on_hopper import NEEDS_HOPPER

from kimi_k2.bench.kernels import linear
from kimi_k2.bench.kernels.harness import Captures
from kimi_k2.bench.kernels.tune import LINEAR_TOKENS, ChoiceT, fastest, medians
from kimi_k2.kernels.linear import tuning as linear_tuning

pytestmark = [
    *NEEDS_HOPPER,
    pytest.mark.memory(8),
    pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="times launches: run it without -n"),
]
# APART: microseconds by which two runs of the shortest launches differ. DRAWN of a shape's numbers of tokens.
MOST, APART, DRAWN = 1.03, 0.5, 3


def loss_of(times: Mapping[ChoiceT, float], choice: ChoiceT) -> float:
    return times[choice] / (min(times.values()) + APART)


def test_linears() -> None:
    """None takes 3 % more than the best of our own."""
    captures, draw, device = Captures(), random.Random(51), torch.cuda.get_device_name()
    if not list(linear_tuning.FILES.directory.glob(f"*device={device.replace(' ', '_')}.json")):
        pytest.skip(f"{device} has no tuning files")
    slower = []
    for name, terms in product(linear.SHAPES, (1, 2)):
        for tokens in draw.sample(LINEAR_TOKENS, DRAWN):
            choice = linear_tuning.choose(terms, tokens, *linear.SHAPES[name], device)
            calls = linear.launches(name, terms, tokens)
            near = fastest(calls, captures)
            loss = min(
                loss_of(medians({one: calls[one] for one in {*near, choice}}, captures, 25), choice) for _ in "ab"
            )
            if loss > MOST:
                slower.append((name, terms, tokens, choice, loss, min(near, key=near.__getitem__)))
    assert not slower
