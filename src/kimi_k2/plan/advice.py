"""What would make a plan fit: each suggestion is a plan that was made and does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.plan.memory import MemoryPlan, cache_bytes, memory_plan, reported_scratch
from kimi_k2.plan.target import GIB, Target

MAX_RANKS = {"neuron": 64, "cuda": 8}


def longest_context(config: KimiK2Config, target: Target, plan: MemoryPlan) -> int:
    """Cache slots a sequence that fit beside the weights, before scratch; at most max_position_embeddings."""
    one = cache_bytes(config, target, 1)
    return max(min((plan.room + plan.parts["KV cache"]) // one, config.max_position_embeddings), 0)


def longest_context_with_scratch(config: KimiK2Config, target: Target, plan: MemoryPlan) -> int | None:
    """The same with scratch as it was reported for the published port; None where nothing was reported."""
    if plan.scratch is None:
        return None
    low, high = 0, longest_context(config, target, plan)
    fixed = plan.resident - plan.parts["KV cache"]
    while low < high:
        middle = (low + high + 1) // 2
        needed = fixed + cache_bytes(config, target, middle) + reported_scratch(middle).nbytes
        low, high = (middle, high) if needed <= plan.memory.usable else (low, middle - 1)
    return low


def advice(config: KimiK2Config, target: Target, plan: MemoryPlan) -> list[str]:
    """Changes, one at a time, with which the plan fits; empty if it fits already.

    When no single change is enough, that is said with what the machine can hold at most.
    """
    if plan.fits:
        return []
    found = []
    if (length := longest_context(config, target, plan)) >= 1:
        found.append(f"a context of at most {length:,} tokens instead of {target.context:,}")
        if (batch := plan_batch(config, target, plan)) >= 1:
            found.append(f"a batch of at most {batch} instead of {target.batch}")
    for words, other in _alternatives(target):
        try:
            changed = memory_plan(config, other)
        except ConfigError:
            continue
        if changed.fits:
            found.append(f"{words} ({changed.resident / GIB:.1f} of {changed.memory.usable / GIB:.1f} GiB)")
    if not found:
        whole = plan.memory.usable * MAX_RANKS[target.layout.target]
        found.append(
            f"nothing that is known here: all {MAX_RANKS[target.layout.target]} ranks of one host have"
            f" {whole / GIB:,.0f} GiB together; use a smaller format or several hosts"
        )
    return found


def plan_batch(config: KimiK2Config, target: Target, plan: MemoryPlan) -> int:
    """Sequences of the target's context that fit beside the weights."""
    each = cache_bytes(config, replace(target, batch=1))
    return max((plan.room + plan.parts["KV cache"]) // each, 0)


def _alternatives(target: Target) -> Iterator[tuple[str, Target]]:
    layout = target.layout
    if layout.target == "neuron":
        formats = ("blockwise", "per_channel")
        for experts in formats:
            if experts != layout.experts:
                yield f"experts in {experts} FP8", replace(target, layout=replace(layout, experts=experts))
    elif layout.experts == "bf16":
        yield "the checkpoint's own format", replace(target, layout=replace(layout, experts="stored"))
    tensor_parallel = layout.moe_tp
    while tensor_parallel * layout.moe_ep < MAX_RANKS[layout.target]:
        tensor_parallel *= 2
        wider = replace(layout, moe_tp=tensor_parallel)
        yield f"{wider.ranks} ranks instead of {layout.ranks}", replace(target, layout=wider)
