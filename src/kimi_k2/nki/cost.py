"""Cost of a kernel by published rates: bytes, descriptors, time by engine, and the overlap that dependences permit.

Modelled, not measured. The schedule: an engine runs its instructions in the kernel's order; an instruction waits for
all earlier ones that touch the same memory (unless both read); DMA transfers share the 16 engines, and one whose
operands are ready does not wait for one whose operands are not. Tiles without an address never wait for memory. The
other core of LNC=2 is taken to arrive at the same time. Launching a kernel is not counted.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from kimi_k2.nki.core import Access, Instruction
from kimi_k2.nki.launch import Kernel
from kimi_k2.nki.rates import TRAINIUM2, Rates, descriptors, hbm_bytes, seconds


@dataclass
class Cost:
    """Modelled cost of a kernel on one core.

    Attributes:
        hbm_bytes: read from and written to HBM.
        descriptors: runs of contiguous bytes.
        busy: seconds by engine.
        instructions: by engine.
        span: seconds from start to end under the dependences.
    """

    hbm_bytes: int = 0
    descriptors: int = 0
    busy: dict[str, float] = field(default_factory=dict)
    instructions: dict[str, int] = field(default_factory=dict)
    span: float = 0.0

    @property
    def bound(self) -> str:
        """The engine that is busy longest."""
        return max(self.busy, key=lambda engine: self.busy[engine])

    @property
    def overlap(self) -> float:
        """Share of the shorter engines' time that is hidden: 1 where the span is the longest engine's time."""
        longest, total = max(self.busy.values()), sum(self.busy.values())
        return 1.0 if total == longest else (total - self.span) / (total - longest)


def cost_of(kernel: Kernel, rates: Rates = TRAINIUM2) -> Cost:
    """Of the kernel's latest run; at LNC=2 of the core that takes longer."""
    if kernel.last is None:
        raise ValueError(f"expected {kernel.__name__} to have run")
    return max((cost_of_trace(trace, rates) for trace in kernel.last.traces), key=lambda cost: cost.span)


def cost_of_trace(trace: list[Instruction], rates: Rates = TRAINIUM2) -> Cost:
    """Of the instructions of one core."""
    schedule = Schedule(rates)
    for instruction in trace:
        schedule.add(instruction)
    return schedule.cost


class Schedule:
    """When each instruction of one core ends, of one kernel or of several that follow each other.

    Attributes:
        cost: of what has been added.
    """

    def __init__(self, rates: Rates = TRAINIUM2) -> None:
        self.rates = rates
        self.cost = Cost()
        self._free: dict[str, float] = {}
        self._transfers: list[tuple[float, float]] = []  # times in which the DMA engines are taken
        self._history: dict[tuple[int, int], list[tuple[Access, float]]] = {}

    def add(self, instruction: Instruction, run: int = 0, not_before: float = 0.0) -> float:
        """Schedule the next instruction; returns the time at which its result is there.

        Args:
            instruction: of a kernel's trace.
            run: which run of the kernel: the same storages in another run are other memory.
            not_before: seconds; earlier than that the instruction may not start.
        """
        if not instruction.accesses:
            return 0.0
        cost, engine = self.cost, instruction.engine
        taken = seconds(instruction, self.rates)
        cost.busy[engine] = cost.busy.get(engine, 0.0) + taken
        cost.instructions[engine] = cost.instructions.get(engine, 0) + 1
        ready = max(_ready(box, self._history.get((run, box.storage), [])) for box in instruction.accesses)
        ready = max(ready, not_before)
        if engine == "dma":
            cost.hbm_bytes += hbm_bytes(instruction)
            cost.descriptors += descriptors(instruction)
            start = _gap(self._transfers, ready, taken)
            insort(self._transfers, (start, start + taken))
            end = start + taken + self.rates.dma_latency
        else:
            start = max(ready, self._free.get(engine, 0.0))
            end = self._free[engine] = start + taken
        for box in instruction.accesses:
            _remember(self._history.setdefault((run, box.storage), []), box, end)
        cost.span = max(cost.span, end)
        return end

    def written(self, storages: list[int], run: int = 0) -> float:
        """When the last write so far to these storages has ended."""
        found = (when for storage in storages for box, when in self._history.get((run, storage), []) if box.written)
        return max(found, default=0.0)


def _ready(box: Access, earlier: list[tuple[Access, float]]) -> float:
    return max((end for other, end in earlier if (box.written or other.written) and box.overlaps(other)), default=0.0)


def _remember(earlier: list[tuple[Access, float]], box: Access, end: float) -> None:
    """Add an access; those that a write covers whole need not be remembered."""
    if box.written:
        earlier[:] = [(other, when) for other, when in earlier if not _covers(box, other)]
    earlier.append((box, end))


def _covers(box: Access, other: Access) -> bool:
    return box.low <= other.low and other.high <= box.high and box.first <= other.first and other.last <= box.last


def _gap(transfers: list[tuple[float, float]], ready: float, taken: float) -> float:
    """The earliest time from `ready` at which the DMA engines are free for `taken`."""
    start = ready
    for begin, end in transfers:
        if start + taken <= begin:
            break
        start = max(start, end)
    return start
