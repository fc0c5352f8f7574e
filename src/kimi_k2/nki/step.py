"""A decode step's layer as our kernels with collectives between them, scheduled on one core. Modelled, not measured.

Two forms: kernels launched one after the other, each when the collective before it has ended; and one kernel a layer,
whose instructions before the first that touches a collective's result (a kernel's *prologue*: weights, the cache and
its transposes) run while the collective before is under way; their DMAs may begin two stages ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kimi_k2.nki.core import Instruction
from kimi_k2.nki.cost import Cost, Schedule, cost_of_trace
from kimi_k2.nki.launch import Kernel
from kimi_k2.nki.rates import Rates
from kimi_k2.nki.storage import Region

_LAYERS = 3  # scheduled, of which the last one's time counts
_AHEAD = 2  # stages by which the DMA engines may run ahead


@dataclass(frozen=True)
class Stage:
    """A kernel, run on the emulator, and the collective that brings its input.

    Attributes:
        name: of the kernel.
        kernel: with its latest launch.
        inputs: positions of the arguments that the collective brings.
        collective: what it is, in words.
    """

    name: str
    kernel: Kernel
    inputs: tuple[int, ...]
    collective: str

    def trace(self, core: int) -> tuple[list[Instruction], list[Instruction]]:
        """The prologue and what comes after it, of one core."""
        launch = self.kernel.last
        assert launch is not None
        brought = {launch.arguments[place] for place in self.inputs}
        trace = [one for one in launch.traces[core] if one.accesses]
        touches = (any(box.storage in brought for box in one.accesses) for one in trace)
        first = next((number for number, one in enumerate(touches) if one), len(trace))
        return trace[:first], trace[first:]

    def cost(self, rates: Rates) -> Cost:
        """Of the kernel alone, on the core that takes longer."""
        launch = self.kernel.last
        assert launch is not None
        return max((cost_of_trace(trace, rates) for trace in launch.traces), key=lambda cost: cost.span)


def one_after_the_other(stages: list[Stage], rates: Rates, collective: float) -> float:
    """Seconds of a layer whose kernels start when the collective before them has ended."""
    return sum(stage.cost(rates).span + collective for stage in stages)


def one_kernel(stages: list[Stage], rates: Rates, collective: float) -> float:
    """Seconds of a layer in one kernel whose prologues run ahead, on core 0, which stores what both cores hold."""
    schedule = Schedule(rates)
    parts = [stage.trace(0) for stage in stages]
    count = len(stages)
    begun = [0.0] * (_AHEAD + 1)  # of the latest stages
    arrived, ends = 0.0, []
    for step in range(_LAYERS * count):
        layer, place = divmod(step, count)
        # The engines come to a prologue when they have done the stage before; DMA engines may have begun earlier.
        for instruction in parts[place][0]:
            schedule.add(instruction, layer, begun[0])
        for instruction in parts[place][1]:
            schedule.add(instruction, layer, arrived)
        launch = stages[place].kernel.last
        assert launch is not None
        begun = [*begun[1:], arrived]
        arrived = schedule.written(launch.results, layer) + collective
        if place == count - 1:
            ends.append(arrived)
    return ends[-1] - ends[-2]


def sbuf_bytes(stages: list[Stage], core: int = 0) -> int:
    """Bytes a partition of SBUF that a layer in one kernel holds at most, tiles by their first and last instruction."""
    order: list[tuple[int, Instruction]] = []
    parts = [stage.trace(core) for stage in stages]
    count = len(stages)
    for step in range(3 * count):
        following, ahead = divmod(step + _AHEAD, count)
        order += [(following, one) for one in parts[ahead][0] if one.engine == "dma"]
        layer, place = divmod(step, count)
        order += [(layer, one) for one in parts[place][0] if one.engine != "dma"]
        order += [(layer, one) for one in parts[place][1]]
    lives: dict[tuple[int, int], list[int]] = {}
    for at, (layer, instruction) in enumerate(order):
        for box in instruction.accesses:
            if box.region is Region.sbuf:
                life = lives.setdefault((layer, box.storage), [at, at, 0])
                life[1], life[2] = at, max(life[2], box.last)
    events: dict[int, int] = {}
    for first, last, nbytes in lives.values():
        events[first] = events.get(first, 0) + nbytes
        events[last + 1] = events.get(last + 1, 0) - nbytes
    alive = most = 0
    for at in sorted(events):
        alive += events[at]
        most = max(most, alive)
    return most


def described(stages: list[Stage], rates: Rates) -> list[dict[str, Any]]:
    """Each kernel's counts and times, and its collective."""
    rows = []
    for stage in stages:
        cost = stage.cost(rates)
        rows.append(
            {
                "kernel": stage.name,
                "collective_before": stage.collective,
                "hbm_bytes": cost.hbm_bytes,
                "descriptors": cost.descriptors,
                "instructions": dict(sorted(cost.instructions.items())),
                "busy_us": {name: round(time * 1e6, 3) for name, time in sorted(cost.busy.items())},
                "span_us": round(cost.span * 1e6, 3),
            }
        )
    return rows
