"""Tests of kernels, on a GPU and what `machines` can do without one.

Several processes test on one GPU, and share its memory by what tests are marked with.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from machines import Machine, standing_in
from on_hopper import assert_words_are_clear
from torch import Tensor

from kimi_k2.kernels.rowwise import decode

# GiB that a process may hold in a test without a mark `memory`, and of its context and libraries beside PyTorch's.
USUAL, CONTEXT = 5.0, 1.0
LEDGER = Path(tempfile.gettempdir()) / f"kimi-k2-gpu-tests-{os.getuid()}.json"


def enter(gibibytes: float, card: float) -> bool:
    """Say what this process holds of a card's memory, if those that are alive leave so much."""
    with LEDGER.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        held = json.loads(LEDGER.read_text()) if LEDGER.exists() else {}
        held = {pid: size for pid, size in held.items() if pid != str(os.getpid()) and Path("/proc", pid).exists()}
        fits = sum(held.values()) + gibibytes <= card or not held
        if fits:
            LEDGER.write_text(json.dumps(held | {str(os.getpid()): gibibytes}))
        return fits


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Several processes test on one GPU: a test waits for the memory that it is marked with, and gets no more.

    Before its fixtures, whose memory is the test's. None waits behind another, so that a test for which there is no
    room yet keeps nobody from ending.
    """
    if not torch.cuda.is_available():
        return
    mark, card = item.get_closest_marker("memory"), torch.cuda.get_device_properties(0).total_memory / 2**30
    share = min(max(mark.args[0] if mark else USUAL, torch.cuda.memory_reserved() / 2**30 + 2), card - CONTEXT)
    while not enter(share + CONTEXT, card):
        time.sleep(0.05)
    torch.cuda.set_per_process_memory_fraction(share / card)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """What one process caches is out of memory for the next; what a module's fixtures hold stays entered."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        enter(torch.cuda.memory_reserved() / 2**30 + CONTEXT, math.inf)


@pytest.fixture(autouse=True)
def control_words_left_clear() -> Iterator[None]:
    """What one kernel leaves in a stream's counters, another one would count on from."""
    yield
    assert_words_are_clear()


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Where a row of `machines.rows` runs."""
    made: Machine = request.param
    with standing_in(made, monkeypatch):
        yield made


@pytest.fixture
def next_launch() -> Callable[[Callable[[], tuple[Tensor, ...]]], None]:
    """Checks that a call has its bits beside a launch whose blocks ask for their weights all at once.

    Reads of shared memory wait behind its loads, for longer than the copy engine takes to fill a stage anew.
    """
    normal, heads, batch = Machine("gpu").normal, 8, 65
    queries = normal(batch, heads * 192), normal(batch, 576), normal(512), *normal(2, batch, 32)
    slots, w_uk, cache = torch.arange(batch, device="cuda") * 4, normal(heads, 128, 512), normal(batch, 4, 576)
    flushed = torch.empty(2**26, dtype=torch.uint8, device="cuda")

    def check(call: Callable[[], tuple[Tensor, ...]]) -> None:
        wanted = call()
        torch.cuda.synchronize()
        for _ in range(80):
            flushed.zero_()
            torch.cuda._sleep(500_000)  # the launches behind it are there when it ends
            found = call()
            decode.absorb_and_store(*queries, slots, w_uk, cache, 1e-6)
            assert all(map(torch.equal, found, wanted))

    return check
