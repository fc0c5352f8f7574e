"""Memory that a graph's intermediate arrays take at once, from HLO text. Modelled: a compiler orders and fuses anew."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from kimi_k2.plan.hlo import Instruction, entry_instructions

# Results that are views of an operand, or so cheap that no compiler stores them.
VIEWS = frozenset({"reshape", "bitcast", "bitcast-convert", "get-tuple-element", "tuple", "broadcast"})
FREE = VIEWS | {"parameter", "constant", "iota"}


@dataclass(frozen=True)
class Peak:
    """The point of a graph at which most is alive.

    Attributes:
        nbytes: of all intermediate arrays that are alive there.
        largest: the largest of them, largest first: (bytes, instruction).
    """

    nbytes: int
    largest: list[tuple[int, Instruction]]


def peak_live_bytes(text: str, largest: int = 5) -> Peak:
    """The peak in the order in which the instructions stand, with nothing fused.

    An array lives from the instruction that makes it to the last one that reads it or a view of it. Parameters are not
    counted, nor is what only leaves the graph: that is the cache, which NxDI updates in place, and a few logits.

    Raises:
        HloParseError: the text cannot be read.
    """
    instructions = list(entry_instructions(text))
    last = _last_uses(instructions)
    users: dict[str, set[str]] = defaultdict(set)
    for one in instructions:
        for operand in one.operands:
            users[operand].add(one.op)
    ends: dict[int, list[str]] = defaultdict(list)
    alive: dict[str, int] = {}
    live = peak = 0
    at_peak: dict[str, int] = {}
    for place, one in enumerate(instructions):
        if one.op not in FREE and users[one.name] != {"tuple"}:
            alive[one.name] = sum(shape.nbytes for shape in one.shapes)
            live += alive[one.name]
            ends[last[one.name]].append(one.name)
            if live > peak:
                peak, at_peak = live, dict(alive)
        for name in ends.pop(place, []):
            live -= alive.pop(name)
    named = {one.name: one for one in instructions}
    ranked = sorted(((size, named[name]) for name, size in at_peak.items()), key=lambda item: -item[0])
    return Peak(peak, ranked[:largest])


def _last_uses(instructions: list[Instruction]) -> dict[str, int]:
    """Place of the last instruction that needs each result."""
    last: dict[str, int] = {}
    for place in reversed(range(len(instructions))):
        one = instructions[place]
        until = last.get(one.name, place) if one.op in VIEWS else place
        last.setdefault(one.name, place)
        for operand in one.operands:
            last[operand] = max(last.get(operand, 0), until)
    return last
