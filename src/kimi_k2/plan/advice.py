"""What would make a plan fit: each suggestion is a plan that was made and does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice

from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.plan.memory import MemoryPlan, cache_bytes, make_scratch, memory_plan, reported_scratch
from kimi_k2.plan.roofline import INSTANCES
from kimi_k2.plan.target import GIB, RESERVED_SLOTS, Target
from kimi_k2.sharding.experts.format import expert_formats

MAX_RANKS = {one.target: one.ranks for one in INSTANCES.values()}


def longest_context(config: KimiK2Config, target: Target, plan: MemoryPlan) -> int:
    """Cache slots a sequence with which the plan fits, scratch included; at most max_position_embeddings."""

    def fits(context: int) -> bool:
        other = replace(target, context=context, prompt=min(target.prompt, context))
        return _with_cache(config, other, plan) <= plan.memory.usable

    return _last(fits, config.max_position_embeddings)


def longest_context_with_scratch(config: KimiK2Config, target: Target, plan: MemoryPlan) -> int | None:
    """The same with scratch as it was reported for the published port; None where nothing was reported."""
    if plan.scratch is None:
        return None
    fixed = plan.resident - plan.parts["KV cache"]

    def fits(context: int) -> bool:
        return fixed + cache_bytes(config, target, context) + reported_scratch(context).nbytes <= plan.memory.usable

    return _last(fits, longest_context(config, target, plan))


def _with_cache(config: KimiK2Config, target: Target, plan: MemoryPlan) -> int:
    """Bytes needed by `plan` with the cache and scratch of another batch or context."""
    scratch = make_scratch(config, target).nbytes if target.is_neuron else 0
    return plan.resident - plan.parts["KV cache"] + cache_bytes(config, target) + scratch


def _last(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, if all smaller ones do; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def advice(config: KimiK2Config, target: Target, plan: MemoryPlan) -> list[str]:
    """Changes, one at a time, with which the plan fits; empty if it fits already.

    When no single change is enough, that is said with what the machine can hold at most.
    """
    if plan.fits:
        return []
    changes = []
    if (length := longest_context(config, target, plan)) >= 1:
        changes.append(f"a context of at most {length:,} tokens instead of {target.context:,}")
        if (batch := plan_batch(config, target, plan)) >= 1:
            changes.append(f"a batch of at most {batch} instead of {target.batch}")
    changes += _first(config, _flash_decoding(target), 1)
    changes += _first(config, _alternatives(target), None)
    if not changes:
        whole = plan.memory.usable * MAX_RANKS[target.layout.target]
        changes.append(
            f"nothing that is known here: all {MAX_RANKS[target.layout.target]} ranks of one host have"
            f" {whole / GIB:,.0f} GiB together; use a smaller format or several hosts"
        )
    return changes


def plan_batch(config: KimiK2Config, target: Target, plan: MemoryPlan) -> int:
    """Sequences of the target's context with which the plan fits."""
    return _last(lambda batch: _with_cache(config, replace(target, batch=batch), plan) <= plan.memory.usable, 4096)


def _first(config: KimiK2Config, changes: Iterator[tuple[str, Target]], most: int | None) -> list[str]:
    """The first `most` changes (all if None) with which a plan fits, and what it then needs."""
    plans = ((words, _plan_or_none(config, other)) for words, other in changes)
    words_of = (
        f"{words} ({plan.needed / GIB:.1f} of {plan.memory.usable / GIB:.1f} GiB)"
        for words, plan in plans
        if plan is not None and plan.fits
    )
    return list(islice(words_of, most))


def _plan_or_none(config: KimiK2Config, target: Target) -> MemoryPlan | None:
    try:
        return memory_plan(config, target)
    except ConfigError:
        return None


def _flash_decoding(target: Target) -> Iterator[tuple[str, Target]]:
    cores = 2 * target.cache_ranks
    while target.is_neuron and target.torch_native is None and target.layout.ranks % cores == 0:
        split = replace(target, cache_ranks=cores, reserved_slots=RESERVED_SLOTS)
        yield f"the cache split over {cores} ranks (flash decoding)", split
        cores *= 2


def _alternatives(target: Target) -> Iterator[tuple[str, Target]]:
    layout = target.layout
    if layout.target == "neuron":
        for experts, one in expert_formats().items():
            if experts != layout.experts and one.quantization_type and not (one.tiles or layout.tiles):
                yield f"experts in {experts} FP8", replace(target, layout=replace(layout, experts=experts))
    elif layout.experts == "bf16":
        yield "the checkpoint's own format", replace(target, layout=replace(layout, experts="stored"))
    tensor_parallel = layout.moe_tp
    while tensor_parallel * layout.moe_ep < MAX_RANKS[layout.target]:
        tensor_parallel *= 2
        wider = replace(layout, moe_tp=tensor_parallel)
        yield f"{wider.ranks} ranks instead of {layout.ranks}", replace(target, layout=wider)
