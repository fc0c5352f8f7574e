"""The plan of MLA decode attention, made by the CUDA kernel on the host, against what any plan must hold."""

from __future__ import annotations

import ctypes
import heapq
import math
import random
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kimi_k2.kernels.attention import mla_plan
from kimi_k2.kernels.common.build import KERNELS, source_of

COMPILER = shutil.which("g++")
STAND_IN = Path(__file__).with_name("cuda_on_cpu.h")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
SM_COUNT, ROWS, MOST_PARTS = 132, 64, 128
Parts = list[tuple[int, int, int, int]]  # request, part, parts, length


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    out = tmp_path_factory.mktemp("plan") / "plan.so"
    flags = ("-O1", "-std=c++17", "-shared", "-fPIC", "-w", "-DKIMI_K2_CUDA_ON_CPU", "-x", "c++")
    command = [str(COMPILER), *flags, f"-I{KERNELS}", "-include", str(STAND_IN), "-o", str(out)]
    done = subprocess.run([*command, str(source_of("attention/mla_plan"))], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return ctypes.CDLL(str(out))


Merges = list[tuple[int, int, int]]  # request, first item, parts


def planned(library: ctypes.CDLL, lengths: Sequence[int], capacity: int) -> tuple[Merges, Parts]:
    """The merges, those of many parts first, and the items."""
    given = torch.tensor(lengths, dtype=torch.int32)
    slots = mla_plan.slots_for(len(lengths), SM_COUNT)
    plan = torch.full((len(lengths) + slots, 4), 7, dtype=torch.int32)
    sizes = len(lengths), capacity, slots, SM_COUNT, ctypes.c_float(2.0)
    assert library.kimi_mla_plan(ctypes.c_void_p(given.data_ptr()), ctypes.c_void_p(plan.data_ptr()), *sizes, None) == 0
    merges = [tuple(row) for row in plan[: len(lengths)].tolist()]
    counts = merges[0][3]
    assert all(merge[3] == counts for merge in merges)
    number = (counts & 1023) + (counts >> 10 & 1023) + (counts >> 20)
    assert all(merge[:3] == (-1, 0, 0) for merge in merges[number:])
    kinds = [0 if parts > 16 else 1 if parts > 4 else 2 for _, _, parts, _ in merges[:number]]
    assert kinds == [0] * (counts & 1023) + [1] * (counts >> 10 & 1023) + [2] * (counts >> 20)
    return [merge[:3] for merge in merges[:number]], [tuple(row) for row in plan[len(lengths) :].tolist()]


def units(length: int) -> int:
    return -(-length // ROWS)


def time_of(items: Parts, overhead: float = 2.0, absent: float = 0.4) -> float:
    """Units of time until the last block ends, each taken by the SM that is free first."""
    free = [0.0] * SM_COUNT
    for request, part, parts, length in items:
        n = units(length)
        size = n * (part + 1) // parts - n * part // parts + overhead if request >= 0 else absent
        heapq.heappush(free, heapq.heappop(free) + size)
    return max(free)


def even_split(lengths: Sequence[int]) -> float:
    """The same for what `mla_decode` does without a plan: every context in the same number of parts."""
    splits = max(1, min(SM_COUNT // len(lengths), 64, units(max(lengths))))
    return time_of([(r, part, splits, length) for r, length in enumerate(lengths) for part in range(splits)])


def lognormal(batch: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [int(min(131072, draw.lognormvariate(math.log(4096), 1.2))) for _ in range(batch)]


CASES = {
    "one": [131072],
    "empty": [0, 0, 0],
    "some empty": [0, 64, 0, 1, 65, 1000],
    "one long": [65536, *[1024] * 63],
    "even": [8192] * 64,
    "waves": [8192] * 140,
    "half a wave": [8192] * 67,
    "most": lognormal(1024, 1),
    **{f"lognormal {batch}": lognormal(batch, batch) for batch in (2, 16, 33, 64, 97, 128, 200, 256)},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("capacity", [131072, 4096])
def test_every_row_is_taken_once(library: ctypes.CDLL, name: str, capacity: int) -> None:
    lengths = CASES[name]
    merges, items = planned(library, lengths, capacity)
    work = [item for item in items if item[0] >= 0]
    assert items[: len(work)] == work, "blocks without work come last"
    assert all(item == (-1, 0, 0, 0) for item in items[len(work) :])
    first: dict[int, int] = {}
    for place, item in enumerate(work):
        first.setdefault(item[0], place)
    parts_of = {item[0]: item[2] for item in work}
    for request, length in enumerate(lengths):
        held, parts = min(length, capacity), parts_of.get(request, 0)
        begin = first.get(request, 0)
        assert work[begin : begin + parts] == [(request, part, parts, held) for part in range(parts)]
        assert parts <= MOST_PARTS and (parts > 0) == (length > 0)
        assert parts <= units(held), "no part is empty"
    assert len(work) == sum(parts_of.values())
    uncut = {request for request, parts in parts_of.items() if parts == 1}
    assert sorted(request for request, _, _ in merges) == sorted(set(range(len(lengths))) - uncut)
    assert all(parts == parts_of.get(request, 0) for request, _, parts in merges)
    assert all(not parts or begin == first[request] for request, begin, parts in merges)
    sizes = [-(-units(length) // parts) for _, _, parts, length in work]
    assert sizes == sorted(sizes, reverse=True), "the longest first"


@pytest.mark.parametrize("name", [name for name in CASES if "empty" not in name])
def test_no_case_is_slower_than_an_even_split(library: ctypes.CDLL, name: str) -> None:
    """By the count of units, overheads included; blocks without work cost a little where there are many."""
    lengths = CASES[name]
    _, items = planned(library, lengths, 131072)
    assert time_of(items) <= 1.03 * even_split(lengths)


@pytest.mark.parametrize("batch", [2, 16, 33, 64, 97, 128, 200, 256])
def test_ragged_batches_are_near_the_bound(library: ctypes.CDLL, batch: int) -> None:
    lengths = lognormal(batch, batch)
    _, items = planned(library, lengths, 131072)
    bound = sum(map(units, lengths)) / SM_COUNT + 2.0
    assert time_of(items) <= 1.2 * bound


def test_one_long_context_among_short_ones(library: ctypes.CDLL) -> None:
    """The case that took an even split eleven times as long as a scheduler by lengths."""
    _, items = planned(library, CASES["one long"], 131072)
    assert time_of(items) < even_split(CASES["one long"]) / 20


def test_sizes_without_a_plan_are_refused(library: ctypes.CDLL) -> None:
    lengths, plan = torch.zeros(2000, dtype=torch.int32), torch.zeros(4000, 4, dtype=torch.int32)
    pointers = ctypes.c_void_p(lengths.data_ptr()), ctypes.c_void_p(plan.data_ptr())
    for batch, slots in ((0, 132), (1025, 2000), (140, 132)):
        assert library.kimi_mla_plan(*pointers, batch, 64, slots, 132, ctypes.c_float(2.0), None) == 1000
