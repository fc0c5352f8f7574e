"""Cost of a kernel by published rates: bytes, descriptors, time by engine, and the overlap that dependences permit.

Modelled, not measured; `schedule` says how. Launching a kernel is not counted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nki_emulator.core import Instruction
from nki_emulator.launch import Kernel
from nki_emulator.rates import TRAINIUM2, Rates, descriptors, hbm_bytes, seconds
from nki_emulator.schedule import ends_of


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


def cost_of(kernel: Kernel, rates: Rates = TRAINIUM2) -> Cost:
    """Of the kernel's latest run; at LNC=2 of the core that takes longer."""
    if kernel.last is None:
        raise ValueError(f"expected {kernel.__name__} to have run")
    costs = [counts_of(trace, rates) for trace in kernel.last.traces]
    for cost, trace in zip(costs, kernel.last.traces, strict=True):
        cost.span = max(ends_of(trace, rates), default=0.0)
    return max(costs, key=lambda cost: cost.span)


def counts_of(trace: list[Instruction], rates: Rates = TRAINIUM2) -> Cost:
    """Of the instructions of one core, without a schedule: its span is 0."""
    cost = Cost()
    for instruction in trace:
        if not instruction.accesses:
            continue
        engine = instruction.engine
        cost.busy[engine] = cost.busy.get(engine, 0.0) + seconds(instruction, rates)
        cost.instructions[engine] = cost.instructions.get(engine, 0) + 1
        if engine == "dma":
            cost.hbm_bytes += hbm_bytes(instruction)
            cost.descriptors += descriptors(instruction)
    return cost
