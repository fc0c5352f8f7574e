"""Tests that need a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from kimi_k2.kernels.common import workspace
from kimi_k2.kernels.rowwise import decode


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """Several processes test on one GPU: what one caches is out of memory for the next."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def control_words_left_clear() -> Iterator[None]:
    """What one kernel leaves in a stream's counters, another one would count on from."""
    yield
    assert not workspace.left_dirty()


@pytest.fixture
def next_launch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A launch whose blocks, beside those of the launch before it, ask for their weights all at once.

    Reads of shared memory wait behind its loads, for longer than the copy engine takes to fill a stage anew.
    """
    heads, batch = 8, 65
    w_uk = torch.randn(heads, 128, 512, device="cuda").bfloat16()
    q = torch.randn(batch, heads * 192, device="cuda").bfloat16()
    kv_a, norm = torch.randn(batch, 576, device="cuda").bfloat16(), torch.ones(512, device="cuda").bfloat16()
    cos, sin = torch.randn(2, batch, 32, device="cuda").bfloat16()
    slots, cache = torch.arange(batch, device="cuda") * 4, torch.zeros(batch, 4, 576, device="cuda").bfloat16()
    monkeypatch.setattr(decode, "ABSORB_GROUPS", range(5, 129))  # the launch with which it was seen

    def launch() -> None:
        decode.absorb_and_store(q, kv_a, norm, cos, sin, slots, w_uk, cache, 1e-6)

    return launch
