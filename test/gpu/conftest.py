"""Tests that need a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kimi_k2.kernels.common import workspace


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
