"""The planner held against memory figures that others published for real Trainium machines.

The figures are reported, not reproduced. Both READMEs say GB; the sizes agree with the tensors that the published code
declares when they are read as GiB, as Neuron's tools print them (24 GB of bank and 23.363 GB usable likewise).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kimi_k2.config import KimiK2Config
from kimi_k2.plan.memory import MICROCODE_BYTES, MemoryPlan, memory_plan
from kimi_k2.plan.scratch import reported_scratch
from kimi_k2.plan.target import GIB, PUBLISHED_PORT, load_target


@dataclass(frozen=True)
class PublishedMemory:
    """A published figure beside the plan of the same arrangement.

    Attributes:
        what: which figure, of which model and layout.
        published: in GiB (see the module's text on units).
        terms: of the plan, in GiB, by name.
    """

    what: str
    published: float
    terms: dict[str, float]

    @property
    def planned(self) -> float:
        """Sum of the terms in GiB."""
        return sum(self.terms.values())

    @property
    def difference(self) -> float:
        """Planned over published, minus 1."""
        return self.planned / self.published - 1


def published_memory() -> list[PublishedMemory]:
    """All figures that there are."""
    plan = _port_plan("kimi-k2-instruct-0905", "trn2-tp32-ep2", 1024)
    # "I/O" are a NEFF's tensors, so the runtime's micro-code and scratch are not in it.
    rows = [PublishedMemory("K2-0905, TP=32 EP=2, LNC=2, 1024 tokens: NEFF I/O", 17.55, _terms(plan))]
    for context, published in ((128, 20.9), (512, 21.9), (1024, 23.4)):
        plan = _port_plan("kimi-k2.5", "trn2-tp64-ep1", context)
        terms = _terms(plan) | {
            "runtime micro-code": MICROCODE_BYTES / GIB,
            "decode scratch, as its README states it": reported_scratch(context).nbytes / GIB,
        }
        rows.append(PublishedMemory(f"K2.5, TP=64 EP=1, LNC=2, {context} tokens: one bank", published, terms))
    return rows


def _port_plan(model: str, preset: str, context: int) -> MemoryPlan:
    config = KimiK2Config.from_preset(model)
    target = replace(load_target(preset, config), context=context, batch=1, arrangement=PUBLISHED_PORT)
    return memory_plan(config, target)


def _terms(plan: MemoryPlan) -> dict[str, float]:
    return {name: size / GIB for name, size in plan.parts.items() if name != "runtime micro-code"}
