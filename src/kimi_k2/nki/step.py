"""A layer of `decode_layers`, the kernel of a decode step, scheduled on one core. Modelled, not measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from nki_emulator.core import Instruction
from nki_emulator.cost import Cost, counts_of
from nki_emulator.launch import Kernel, Launch
from nki_emulator.rates import Rates
from nki_emulator.schedule import critical_path, ends_of
from nki_emulator.storage import Region


@dataclass(frozen=True)
class Layers:
    """A kernel of several layers with collectives inside, run on one rank of the emulator.

    The layer before the last is taken for all: its loads run ahead of it, and it has a next one to load for. Of a
    kernel of one layer all is taken, from its first load to its last store.

    Attributes:
        kernel: with its latest launch.
        collectives: of a layer, in words, in their order.
        apart: whether it is of one layer.
    """

    kernel: Kernel
    collectives: tuple[str, ...]
    apart: bool = False

    @property
    def launch(self) -> Launch:
        """The kernel's latest."""
        assert self.kernel.last is not None
        return self.kernel.last

    def _bounds(self, trace: list[Instruction]) -> list[int]:
        """The collectives of the layer before the last, and the last one of the layer before it; -1 for the start."""
        positions = [number for number, one in enumerate(trace) if one.engine == "collective"]
        count = len(self.collectives)
        if self.apart:  # behind the last comes its result's way to HBM
            return [-1, *positions[: count - 1], len(trace) - 1]
        return positions[-2 * count - 1 : -count]

    def stages(self, rates: Rates) -> list[float]:
        """Seconds from one collective's end to the next one's, on the core that takes longer over the layer."""
        best: list[float] = []
        for trace in self.launch.traces:
            ends = [*ends_of(trace, rates), 0.0]
            marks = [ends[bound] for bound in self._bounds(trace)]
            best = max(best, [after - before for before, after in pairwise(marks)], key=sum)
        return best

    def seconds(self, rates: Rates) -> float:
        """Of a layer."""
        return sum(self.stages(rates))

    def path(self, rates: Rates) -> dict[str, float]:
        """What a layer's time goes to, by engine: seconds on the critical path."""

        def of(trace: list[Instruction]) -> dict[str, float]:
            first, *_, last = self._bounds(trace)
            return critical_path(trace, rates, last, None if first < 0 else first)

        return max(map(of, self.launch.traces), key=lambda path: sum(path.values()))

    def counts(self, rates: Rates) -> Cost:
        """Bytes, descriptors and engines of a layer, of the core that moves more."""
        costs = []
        for trace in self.launch.traces:
            first, *_, last = self._bounds(trace)
            costs.append(counts_of(trace[first + 1 : last + 1], rates))
        return max(costs, key=lambda cost: cost.hbm_bytes)

    def sbuf_bytes(self) -> int:
        """Bytes a partition of SBUF that are alive at once, at most."""
        return self.launch.most[Region.sbuf]


def at(rates: Rates, efficiency: int, latency: int) -> Rates:
    """Rates with the DMA engines at `efficiency` percent and collectives of `latency` microseconds."""
    dma = rates.dma_bytes_a_second * efficiency / 100
    return replace(rates, dma_bytes_a_second=dma, collective_seconds=latency * 1e-6)


def described(cost: Cost) -> dict[str, Any]:
    """Counts and times, as they are stored."""
    return {
        "hbm_bytes": cost.hbm_bytes,
        "descriptors": cost.descriptors,
        "instructions": dict(sorted(cost.instructions.items())),
        "busy_us": {name: round(time * 1e6, 3) for name, time in sorted(cost.busy.items())},
    }
