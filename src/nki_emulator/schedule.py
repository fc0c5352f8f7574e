"""When each instruction of one core ends: engines in the kernel's order, DMA rings that share the DMA engines.

Modelled. An instruction waits for all earlier ones that touch the same memory (unless both read). A compute engine runs
its instructions in the kernel's order. Transfers go through rings, each one transfer at a time, the first in the
kernel's order that is ready; rings at work share the engines evenly, as the arbitration is round-robin
(compute-comm-overlap.rst). A transfer does not begin before the collective that precedes it in the kernel, so that a
kernel says how far its loads run ahead. Tiles without an address never wait for memory. The other core of LNC=2 and the
other ranks are taken to arrive at the same time.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

from nki_emulator.core import Access, Instruction
from nki_emulator.rates import Rates, seconds

_DONE = 1e-12  # seconds; a transfer that has less left is done


def ends_of(trace: list[Instruction], rates: Rates) -> list[float]:
    """Seconds at which the result of each instruction is there; 0 for one that touches nothing."""
    return _Simulation(trace, rates).run()


def critical_path(trace: list[Instruction], rates: Rates, last: int, first: int | None) -> dict[str, float]:
    """What the time between the ends of instructions `first` (None: the start) and `last` goes to: seconds by engine.

    Each instruction on the way waits for nothing but the one before it. `dma` is transfers with their wait for a ring,
    `dma latency` what lies between trigger and data.
    """
    run = _Simulation(trace, rates)
    ends = run.run()
    start = 0.0 if first is None else ends[first]
    by_engine: dict[str, float] = {}
    number: int | None = last
    while number is not None and number != first and ends[number] > start:
        engine, begun = trace[number].engine, max(run.starts[number], start)
        taken = ends[number] - begun
        if engine == "dma":
            latency = min(taken, rates.dma_latency)
            by_engine["dma latency"] = by_engine.get("dma latency", 0.0) + latency
            taken -= latency
        by_engine[engine] = by_engine.get(engine, 0.0) + taken
        number, at_start = run.causes.get(number, (None, False))
        while number is not None and at_start:  # triggered with a collective, not by its end
            number, at_start = run.causes.get(number, (None, False))
    return by_engine


def ring_of(instruction: Instruction) -> str:
    """The DMA ring of a transfer: loads whose place is known, loads by a run-time index, and all that leaves SBUF."""
    details, boxes = instruction.details, instruction.accesses
    if details.get("ring"):
        return str(details["ring"])
    if any(not box.written and box.region.on_chip and not box.operand.endswith("(index)") for box in boxes):
        return "from SBUF"
    return "by index" if details.get("indirect") else "loads"


@dataclass
class _Ring:
    """Transfers that are ready, and the one under way."""

    ready: list[int] = field(default_factory=list)
    current: int | None = None
    left: float = 0.0


class _Simulation:
    def __init__(self, trace: list[Instruction], rates: Rates) -> None:
        self.trace, self.rates = trace, rates
        self.ends = [0.0] * len(trace)
        self.waits = [0] * len(trace)
        self.after: list[list[int]] = [[] for _ in trace]
        self.after_start: dict[int, list[int]] = {}
        self.queues: dict[str, deque[int]] = {}
        self.busy: dict[str, bool] = {}
        self.rings: dict[str, _Ring] = {}
        self.now = 0.0
        self.starts = [0.0] * len(trace)
        # What an instruction waited for last; True: for its start.
        self.causes: dict[int, tuple[int | None, bool]] = {}
        self.cause: tuple[int | None, bool] = (None, False)
        self.events: list[tuple[float, int, bool]] = []
        self._link()

    def _link(self) -> None:
        history: dict[int, list[tuple[Access, int]]] = {}
        issued: int | None = None
        for number, event in enumerate(self.trace):
            if not event.accesses:
                continue
            before = {
                other
                for box in event.accesses
                for seen, other in history.get(box.storage, [])
                if (box.written or seen.written) and other != number and box.overlaps(seen)
            }
            for other in before:
                self.after[other].append(number)
            self.waits[number] = len(before)
            if event.engine == "dma" and issued is not None:
                self.after_start.setdefault(issued, []).append(number)
                self.waits[number] += 1
            if event.engine == "collective":
                issued = number
            for box in event.accesses:
                _remember(history.setdefault(box.storage, []), box, number)
            if event.engine != "dma":
                self.queues.setdefault(event.engine, deque()).append(number)

    def run(self) -> list[float]:
        """Run all instructions."""
        for number, event in enumerate(self.trace):
            if event.engine == "dma" and event.accesses and self.waits[number] == 0:
                self._offer(number)
        for engine in self.queues:
            self._start(engine)
        while True:
            finish = self._next_transfer()
            if self.events and (finish is None or self.events[0][0] <= finish):
                when, number, _ = heapq.heappop(self.events)
                self._advance(when)
                self._done(number)
            elif finish is not None:
                self._advance(finish)
                self._finish_transfers()
            else:
                return self.ends

    def _start(self, engine: str) -> None:
        queue = self.queues[engine]
        if self.busy.get(engine) or not queue or self.waits[queue[0]] > 0:
            return
        number = queue.popleft()
        self.busy[engine] = True
        self.starts[number], self.causes[number] = self.now, self.cause
        heapq.heappush(self.events, (self.now + seconds(self.trace[number], self.rates), number, True))
        waiting = self.after_start.get(number, [])
        if waiting:
            cause, self.cause = self.cause, (number, True)
            for other in waiting:
                self._release(other)
            self.cause = cause

    def _offer(self, number: int) -> None:
        self.starts[number], self.causes[number] = self.now, self.cause
        ring = self.rings.setdefault(ring_of(self.trace[number]), _Ring())
        heapq.heappush(ring.ready, number)
        self._take(ring)

    def _take(self, ring: _Ring) -> None:
        if ring.current is None and ring.ready:
            ring.current = heapq.heappop(ring.ready)
            ring.left = seconds(self.trace[ring.current], self.rates)

    def _next_transfer(self) -> float | None:
        left = [ring.left for ring in self.rings.values() if ring.current is not None]
        return self.now + min(left) * len(left) if left else None

    def _advance(self, when: float) -> None:
        active = [ring for ring in self.rings.values() if ring.current is not None]
        for ring in active:
            ring.left -= (when - self.now) / len(active)
        self.now = when

    def _finish_transfers(self) -> None:
        for ring in self.rings.values():
            if ring.current is not None and ring.left <= _DONE:
                heapq.heappush(self.events, (self.now + self.rates.dma_latency, ring.current, False))
                ring.current = None
                self._take(ring)

    def _done(self, number: int) -> None:
        self.ends[number], self.cause = self.now, (number, False)
        engine = self.trace[number].engine
        if engine != "dma":
            self.busy[engine] = False
        for other in self.after[number]:
            self._release(other)
        if engine != "dma":
            self._start(engine)

    def _release(self, number: int) -> None:
        self.waits[number] -= 1
        if self.waits[number]:
            return
        engine = self.trace[number].engine
        if engine == "dma":
            self._offer(number)
        else:
            self._start(engine)


def _remember(earlier: list[tuple[Access, int]], box: Access, number: int) -> None:
    """Add an access; those that a write covers whole need not be remembered."""
    if box.written:
        earlier[:] = [(other, when) for other, when in earlier if when == number or not _covers(box, other)]
    earlier.append((box, number))


def _covers(box: Access, other: Access) -> bool:
    return box.low <= other.low and other.high <= box.high and box.first <= other.first and other.last <= box.last
