"""What the kernels of a lowered step read whose address and value no collective of the step brings.

Such reads (weights, the cache) can be under way while a collective is: a kernel's operand that is a parameter of the
graph, or a view of one, depends on nothing in it. What is read through a run-time index (the experts that the router
chose) waits for the index, and what is computed in the step for its values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kimi_k2.plan.hlo import entry_instructions, is_parameter, kernel_cost
from kimi_k2.plan.kernel_calls import kernel_name


@dataclass(frozen=True)
class Fetch:
    """Bytes that one kernel call reads from HBM.

    Attributes:
        kernel: its name.
        ahead: of parameters, at addresses that are known before the step.
        chosen: of parameters, through a run-time index.
        computed: of what the step computes.
    """

    kernel: str
    ahead: int
    chosen: int
    computed: int


def fetches(text: str) -> Iterator[Fetch]:
    """Of each call of a kernel of ours in HLO text, in order.

    Raises:
        HloParseError: the text cannot be read.
    """
    instructions = {one.name: one for one in entry_instructions(text)}
    for one in instructions.values():
        if one.op != "custom-call" or (cost := kernel_cost(one, instructions)) is None:
            continue
        ahead = chosen = computed = 0
        for operand, size, indexed in zip(one.operands, cost.read, cost.indexed, strict=True):
            if is_parameter(operand, instructions):
                ahead, chosen = ahead + size - indexed, chosen + indexed
            else:
                computed += size
        yield Fetch(kernel_name(one.attributes) or "", ahead, chosen, computed)
