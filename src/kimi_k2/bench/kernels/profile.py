"""TPOT and TTFT of a rank on a GPU: from pre-sharded files, or with synthetic weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kimi_k2.bench.kernels.model import launches, make_step, synthetic_rank, time_prefill, time_step
from kimi_k2.bench.kernels.routing import Routing
from kimi_k2.config import KimiK2Config
from kimi_k2.errors import ConfigError
from kimi_k2.model.cache import kv_cache_dtype
from kimi_k2.parallel.apply import load_rank
from kimi_k2.parallel.ranks import join_ranks, leave_ranks, world_size
from kimi_k2.plan.cost import decode_counts, roofline
from kimi_k2.plan.deployment import Target
from kimi_k2.plan.machines import INSTANCES
from kimi_k2.plan.memory import category
from kimi_k2.sharding.layout import Layout


@dataclass(frozen=True)
class Job:
    """What to time.

    Attributes:
        contexts: cached tokens of each sequence that a decode step attends over.
        prompt: tokens of the prefill; 0 for none.
        layers: fewer than the model has; the totals are then extrapolated. None for all.
        weights: output of `convert --target cuda`; None for synthetic weights.
        stand_in: one GPU as rank 0 of the layout; nothing is sent.
        kv_cache: dtype of the KV cache, see `kv_cache_dtype`.
        batch_invariant: the model's mode.
        launches: also list what one step launches, by time.
        routing: of tokens to experts; None leaves it to the synthetic router.
    """

    contexts: tuple[int, ...]
    prompt: int
    layers: int | None = None
    weights: Path | None = None
    stand_in: bool = False
    kv_cache: str = "auto"
    batch_invariant: bool = False
    launches: bool = False
    routing: Routing | None = None


def profile(config: KimiK2Config, layout: Layout, job: Job) -> list[str]:
    """The lines of rank 0's report; none on other ranks.

    Raises:
        ConfigError: the processes that torchrun started are not the layout's ranks.
    """
    rank, _ = join_ranks("cuda")
    lines = list(_measure(config, layout, job, rank))
    leave_ranks()
    return lines if rank == 0 else []


def floor(
    config: KimiK2Config,
    layout: Layout,
    card: str,
    contexts: Sequence[int],
    distinct: float | None = None,
    cache_bytes: int = 2,
) -> tuple[float, int]:
    """What a rank's step takes at least by its reads or its arithmetic: seconds, and bytes.

    Args:
        config, layout: of the ranks.
        card: its name; one that is not known is taken for an H200.
        contexts: cached tokens of each sequence.
        distinct: experts of a layer that the step's tokens chose; None for what uniform routing gives on average.
        cache_bytes: of a cached value.
    """
    known = next((instance for name, instance in INSTANCES.items() if name in card.lower()), INSTANCES["h200"])
    context = max(sum(contexts) // len(contexts), 1)
    target = Target("floor", config, layout, known.machine, known.memory, len(contexts), context, context)
    counts = decode_counts(target)
    counts.read["cache"] = counts.read["cache"] * cache_bytes // target.cache_itemsize
    if distinct is not None:
        for name in counts.read:
            if category(name).startswith("expert"):
                counts.read[name] = round(counts.held[name] * min(distinct / config.n_routed_experts, 1))
    return roofline(counts, known.machine).alone, counts.memory_bytes


def _measure(config: KimiK2Config, layout: Layout, job: Job, rank: int) -> Iterator[str]:
    whole = config.num_hidden_layers
    config = config.model_copy(update={"num_hidden_layers": job.layers or whole})
    missing = whole - config.num_hidden_layers
    communicate = not job.stand_in and layout.ranks > 1
    if communicate and world_size() != layout.ranks:
        raise ConfigError(
            f"the preset has {layout.ranks} ranks, but {world_size()} processes run: start them with"
            f" `torchrun --nproc-per-node {layout.ranks} --no-python`, or give --stand-in"
        )
    if job.weights is not None:
        model = load_rank(job.weights, config, layout, rank, device="cuda")
    else:
        model = synthetic_rank(config, layout, rank, communicate=communicate)
    model.kv_cache_dtype, model.batch_invariant = kv_cache_dtype(job.kv_cache, config), job.batch_invariant
    with model.computing():
        times = time_step(model, job.contexts, communicate=communicate, routing=job.routing)
    yield from times.lines()
    cache = model.kv_cache_dtype.itemsize if model.kv_cache_dtype is not None else 2
    seconds, read = floor(config, layout, torch.cuda.get_device_name(), job.contexts, times.distinct, cache)
    yield (
        f"modelled: floor {seconds * 1e3:.3f} ms, {read / 1e9:.2f} GB at the card's specified rate, without sums: the"
        f" step is at {100 * seconds * 1e6 / times.step:.0f} % of it"
    )
    if missing:
        yield f"extrapolated: TPOT {(times.step + missing * times.moe_layer) / 1e3:.3f} ms over {whole} layers"
    if job.prompt:
        ttft, layer = time_prefill(model, len(job.contexts), job.prompt, communicate=communicate, routing=job.routing)
        yield f"measured: TTFT {ttft / 1e3:.2f} ms of {job.prompt} tokens, MoE layer {layer / 1e3:.3f} ms"
        if missing:
            yield f"extrapolated: TTFT {(ttft + missing * layer) / 1e3:.1f} ms over {whole} layers"
    if job.launches:
        yield from launches(make_step(model, job.contexts, communicate=communicate, routing=job.routing))
