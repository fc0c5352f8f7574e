"""Tests that need a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """Several processes test on one GPU: what one caches is out of memory for the next."""
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
