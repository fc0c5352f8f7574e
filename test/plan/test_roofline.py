"""Bounds of a step from its counts, against figures worked out by hand."""

from __future__ import annotations

from kimi_k2.plan.roofline import Collective, GraphCounts, Machine, roofline


def test_roofline_adds_communication_to_the_larger_of_memory_and_compute() -> None:
    machine, ring = Machine("unit", 1.0, 1.0, 1.0, 1000.0, "made up"), Collective("all-reduce", 4, 96)
    counts = GraphCounts({"weight": 100}, moved={"scatter": 44}, flops=384, collectives={ring: 1})
    modelled = roofline(counts, machine)
    assert (modelled.memory, modelled.compute) == (144, 384)
    # A ring all-reduce of 96 bytes over 4 ranks moves 2 * 3/4 of them.
    assert modelled.communication == 144 + 1000
    assert modelled.bound == 384 + 1144
    # A reduce-scatter's result is one rank's part of what it moves; an all-gather's is the whole.
    for kind, moved in (("reduce-scatter", 96 * 4 * 3 / 4), ("all-gather", 96 * 3 / 4)):
        alone = GraphCounts(collectives={Collective(kind, 4, 96): 2})
        assert roofline(alone, machine).communication == 2 * (moved + 1000)
