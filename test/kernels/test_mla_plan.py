"""The plan of MLA decode attention, made by the CUDA kernel on the host, against what any plan must hold."""

from __future__ import annotations

import ctypes
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from itertools import pairwise

import pytest
import torch
from machines import NEEDS_COMPILER, library

from kimi_k2.kernels.attention.mla_plan import (
    COSTS,
    CUTS,
    MAX_BATCH,
    SOME_PARTS,
    Costs,
    costs_of,
    pays,
    plan_rows,
    rows_by_length,
    uncut,
)

pytestmark = NEEDS_COMPILER
BLOCKS, ROWS, MOST_PARTS = 132, 64, 128
Item = tuple[int, int, int, int]  # request, first unit, last unit + 1, length
KINDS = [(few, quantized) for few in (True, False) for quantized in (False, True)]


@dataclass(frozen=True)
class Plan:
    """As csrc/mla_plan.cuh lays it out: merges (request, first item, parts), requests (first item, parts), items."""

    merges: list[tuple[int, int, int]]
    requests: list[tuple[int, int]]
    items: list[Item]
    firsts: list[int]

    def blocks(self) -> list[list[Item]]:
        """Each block's items."""
        return [self.items[begin:end] for begin, end in pairwise(self.firsts)]


def call(function: str, lengths: torch.Tensor, plan: torch.Tensor, *sizes: object) -> int:
    pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (lengths, plan))
    status: int = getattr(library("attention/mla_plan"), function)(*pointers, *sizes, None)
    return status


def planned(lengths: Sequence[int], capacity: int, costs: Costs = COSTS[True, False]) -> Plan:
    given, batch = torch.tensor(lengths, dtype=torch.int32), len(lengths)
    plan = torch.full((plan_rows(batch, BLOCKS), 4), -7, dtype=torch.int32)
    sizes = (batch, capacity, BLOCKS, SOME_PARTS[False], *map(ctypes.c_float, astuple(costs)))
    assert call("kimi_mla_plan", given, plan, *sizes) == 0
    return parsed(plan, batch)


def parsed(plan: torch.Tensor, batch: int, some_parts: int = SOME_PARTS[False]) -> Plan:
    merges = [tuple(row) for row in plan[:batch].tolist()]
    counts = merges[0][3]
    assert all(merge[3] == counts for merge in merges)
    number = (counts & 1023) + (counts >> 10 & 1023) + (counts >> 20)
    assert all(merge[:3] == (-1, 0, 0) for merge in merges[number:])
    kinds = [0 if parts > 32 else 1 if parts >= some_parts else 2 for _, _, parts, _ in merges[:number]]
    assert kinds == [0] * (counts & 1023) + [1] * (counts >> 10 & 1023) + [2] * (counts >> 20)
    firsts = plan[2 * batch :].flatten()[: BLOCKS + 1].tolist()
    items = [tuple(row) for row in plan[2 * batch + BLOCKS // 4 + 1 :][: firsts[-1]].tolist()]
    requests = [tuple(row) for row in plan[batch : 2 * batch, :2].tolist()]
    return Plan([merge[:3] for merge in merges[:number]], requests, items, firsts)


def units(length: int) -> int:
    return -(-length // ROWS)


def time_of(blocks: Sequence[Sequence[Item]], costs: Costs) -> float:
    """Microseconds until the last block ends, and the merge."""
    slowest = max(sum((end - begin) * costs.unit + costs.item for _, begin, end, _ in block) for block in blocks)
    whole = sum(end - begin for block in blocks for _, begin, end, _ in block)
    parts = max(Counter(item[0] for block in blocks for item in block).values())
    memory = whole * costs.memory + sum(map(len, blocks)) * costs.traffic
    return max(slowest, memory) + (costs.merge + costs.part * parts if parts > 1 else 0)


def lognormal(batch: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [int(min(131072, draw.lognormvariate(math.log(4096), 1.2))) for _ in range(batch)]


CASES = {
    "one": [131072],
    "empty": [0, 0, 0],
    "some empty": [0, 64, 0, 1, 65, 1000],
    "last empty": [5000, 64, 0, 0],
    "one long": [65536, *[1024] * 63],
    "one long last": [*[1024] * 63, 65536],
    "even": [8192] * 64,
    "even short": [1024] * 64,
    "waves": [8192] * 140,
    "half a wave": [8192] * 67,
    "two a block": [1024] * 256,
    "tiny": [1] * 1024,
    "most": lognormal(1024, 1),
    **{f"lognormal {batch}": lognormal(batch, batch) for batch in (2, 33, 128, 256)},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("capacity", [131072, 4096])
def test_every_row_is_taken_once(name: str, capacity: int) -> None:
    check(planned(CASES[name], capacity), CASES[name], capacity)


def check(plan: Plan, lengths: Sequence[int], capacity: int, most: int | None = None) -> None:
    """Every unit is some block's, once and in order; merges are of the requests that are not one item."""
    assert plan.firsts[0] == 0 and plan.firsts == sorted(plan.firsts)
    place = 0
    for request, length in enumerate(lengths):
        held, (first, parts) = min(length, capacity), plan.requests[request]
        mine = plan.items[place : place + parts]
        assert first == place or not parts
        assert [item[0] for item in mine] == [request] * parts and all(item[3] == held for item in mine)
        edges = [0, *(item[2] for item in mine)]
        assert [item[1] for item in mine] == edges[:-1] and edges[-1] == units(held)
        assert all(begin < end for begin, end in pairwise(edges)), "no part is empty"
        assert parts <= MOST_PARTS and (parts > 0) == (length > 0)
        place += parts
    assert place == len(plan.items) <= (most or len(lengths) + BLOCKS)
    cut = {request for request, (_, parts) in enumerate(plan.requests) if parts != 1}
    assert {merge[0] for merge in plan.merges} == cut and len(plan.merges) == len(cut)
    assert all(plan.requests[request] == (first, parts) for request, first, parts in plan.merges if parts)


def drawn(seed: int) -> list[int]:
    draw = random.Random(seed)
    batch, top = draw.choice((1, 2, 3, 8, 17, 64, 130, 133, 256)), draw.choice((64, 100, 3000, 131072))
    kind = draw.choice(("uniform", "even", "lognormal", "two"))
    if kind == "even":
        return [draw.randrange(1, top + 1)] * batch
    if kind == "two":
        return [draw.choice((top, 1 + top // 50)) for _ in range(batch)]
    if kind == "uniform":
        return [draw.randrange(0, top + 1) for _ in range(batch)]
    return [int(min(top, draw.lognormvariate(math.log(top) - 2, 1.2))) for _ in range(batch)]


# Of so many short contexts most of the time is not their rows'.
TIMED = [
    (lengths, kind)
    for name, lengths in CASES.items()
    if sum(lengths) and name not in ("tiny", "most")
    for kind in ((True, False), (False, True))
]
TIMED += [(drawn(seed), KINDS[seed % 4]) for seed in range(12)]


@pytest.mark.parametrize(("lengths", "kind"), TIMED, ids=lambda one: str(len(one)))
def test_times_are_near_the_bound(lengths: list[int], kind: tuple[bool, bool]) -> None:
    """An even split would take up to 25 times as long, where one context is long among short ones."""
    costs = COSTS[kind]
    plan = planned(lengths, 131072, costs)
    check(plan, lengths, 131072)
    whole = sum(map(units, lengths))
    bound = max(whole / BLOCKS * costs.unit, whole * costs.memory) + costs.item + costs.merge
    parts = max(Counter(item[0] for item in plan.items).values(), default=0)
    assert time_of(plan.blocks(), costs) <= 1.05 * bound + 2 * costs.item + parts * costs.part


def test_a_plan_is_made_of_sequences_that_it_can_hold() -> None:
    batches = (0, 1, 2, MAX_BATCH, MAX_BATCH + 1)
    assert [pays(batch, 8192, 8) for batch in batches] == [False, False, True, True, False]
    assert pays(1, 131072, 8) and not pays(2, 0, 8)


@pytest.mark.parametrize(
    ("batch", "capacity", "heads"), [(200, 128, 8), (140, 128, 16), (140, 256, 64), (1024, 64, 32)]
)
def test_short_contexts_are_not_cut(batch: int, capacity: int, heads: int) -> None:
    """No merges but of contexts without rows, whose results attention itself clears where no merge follows."""
    assert uncut(batch, capacity, heads)
    draw = random.Random(batch)
    for quantized in (False, True):
        lengths = [draw.choice((0, 1, capacity, draw.randrange(capacity + 100))) for _ in range(batch)]
        plan = planned(lengths, capacity, costs_of(batch, capacity, heads, quantized))
        check(plan, lengths, capacity)
        assert all(parts == (length > 0) for length, (_, parts) in zip(lengths, plan.requests, strict=True))


def test_sizes_without_a_plan_are_refused() -> None:
    lengths, plan = torch.zeros(2000, dtype=torch.int32), torch.zeros(8000, 4, dtype=torch.int32)
    for batch, blocks in ((0, 132), (1025, 132), (140, 0), (140, 256)):
        assert call("kimi_mla_plan", lengths, plan, batch, 64, blocks, 9, *map(ctypes.c_float, [1] * 6)) == 1000


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_by_length_a_context_is_cut_alike_in_every_batch(few: bool, seed: int) -> None:
    rng, cut = random.Random(seed), CUTS[few]
    capacity, batch = rng.choice([64, 1000, 9000, 131072]), rng.choice([1, 2, 17, 64, 256, 1024])
    lengths = [int(capacity * rng.random() ** rng.choice([0, 1, 4])) + rng.choice([0, 0, 1]) for _ in range(batch)]
    given = torch.tensor(lengths, dtype=torch.int32)
    plan = torch.full((rows_by_length(batch, capacity, BLOCKS, 8 if few else 64), 4), -7, dtype=torch.int32)
    sizes = (batch, capacity, BLOCKS, SOME_PARTS[few], *astuple(cut))
    assert call("kimi_mla_plan_by_length", given, plan, *sizes) == 0
    found = parsed(plan, batch, SOME_PARTS[few])
    check(found, lengths, capacity, len(plan))
    for length, (first, parts) in zip(lengths, found.requests, strict=True):
        whole = units(min(length, capacity))
        assert parts == (cut.parts(whole) if whole else 0)
        edges = [whole * part // parts for part in range(parts + 1)] if parts else []
        assert [item[1:3] for item in found.items[first : first + parts]] == list(pairwise(edges))
    loads = [sum(4 * (end - begin) + cut.item for _, begin, end, _ in block) for block in found.blocks()]
    longest = max((4 * (end - begin) + cut.item for _, begin, end, _ in found.items), default=0)
    assert max(loads) <= sum(loads) / BLOCKS + longest
