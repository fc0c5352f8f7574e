"""Time of MLA decode attention over a paged cache: ours, and FlashAttention 3 and FlashMLA where vLLM is installed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kimi_k2.bench.kernels import mla_peers
from kimi_k2.bench.kernels.harness import Row, graph_median
from kimi_k2.bench.kernels.mla_cases import SOFTMAX_SCALE, Inputs, ragged_inputs, random_inputs
from kimi_k2.kernels.attention.mla_decode import mla_decode
from kimi_k2.kernels.attention.mla_plan import available
from kimi_k2.kernels.attention.mla_sizes import LATENT, ROW

HEADS = (64, 8)
BATCHES = (1, 16, 64)
CONTEXTS = (1024, 8192, 65536)
# Microseconds aimed at for (heads, batch) at a context of 8192.
TARGETS = {(64, 1): 15.0, (64, 16): 50.0, (64, 64): 155.0, (8, 1): 12.0, (8, 16): 42.0, (8, 64): 140.0}


def _one_long(batch: int) -> list[int]:
    return [65536, *[1024] * (batch - 1)]


def _lognormal(batch: int) -> list[int]:
    draw = random.Random(batch)
    return [max(1, int(min(65536, draw.lognormvariate(math.log(4096), 1.0)))) for _ in range(batch)]


def _uniform(batch: int) -> list[int]:
    draw = random.Random(batch)
    return [draw.randrange(1, 32769) for _ in range(batch)]


# What a server sees beside even batches.
RAGGED = {
    "one of 65,536, the rest 1,024": _one_long,
    "lognormal about 4,096": _lognormal,
    "uniform to 32,768": _uniform,
}
RAGGED_BATCHES = (16, 64, 128)


def ours(one: Inputs) -> Tensor:
    """`mla_decode` as the model calls it."""
    out: Tensor = mla_decode(one.q, one.cache, one.seq_lens, SOFTMAX_SCALE, one.block_table)
    return out


def by_plan(one: Inputs) -> Tensor:
    """`mla_decode` with the work shared out by the lengths; the plan, one for all layers of a step, is not timed."""
    out: Tensor = mla_decode(one.q, one.cache, one.seq_lens, SOFTMAX_SCALE, one.block_table, plan=one.plan)
    return out


def peers(dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[str, Callable[[Inputs], Tensor]]]:
    """(name, call) of each other kernel that can be imported here and takes a cache of this dtype; each is checked."""
    for name, peer in mla_peers.peers(dtype):
        for heads in HEADS:
            one = ragged_inputs([1, 64, 700, 1024], heads, dtype)
            mla_peers.check(name, peer, one, ours(one))
        yield name, peer


def time_mla(
    call: Callable[[Inputs], Tensor],
    batch: int,
    heads: int,
    context: int,
    inputs: Callable[[int, int, int], Inputs] = random_inputs,
) -> float:
    """Median microseconds of graph replays over caches that together are several times the L2.

    At least 16 calls a graph, as a model has one a layer: a graph's own start, about 4 us, is no part of a call.
    """
    count = max(2, min(40, 2**28 // (batch * context * ROW * 2)))
    given = [inputs(batch, heads, context) for _ in range(count)]
    if isinstance(call, mla_peers.Scheduled):
        given = [replace(one, q=one.q.to(call.query_dtype)) for one in given]
        for one in given:
            call.schedule(one)
    calls = [partial(call, one) for one in given]
    return graph_median(calls * -(-16 // count))


def ragged_layers(lengths: list[int], heads: int, dtype: torch.dtype = torch.bfloat16) -> list[Inputs]:
    """As a model's layers: queries and caches of their own; lengths, pages and plan are the same, so stay in the L2."""
    count = max(2, min(40, 2**28 // (sum(lengths) * ROW * 2)))
    first = ragged_inputs(lengths, heads, dtype)
    queries = [torch.randn_like(first.q) for _ in range(count)]
    caches = [torch.randn(first.cache.shape, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(count)]
    return [replace(first, q=q, cache=cache) for q, cache in zip(queries, caches, strict=True)]


def time_layers(call: Callable[[Inputs], Tensor], layers: list[Inputs], replays: int = 25) -> float:
    """As `time_mla` over these inputs, which share one tensor of lengths."""
    if isinstance(call, mla_peers.Scheduled):
        layers = [replace(one, q=one.q.to(call.query_dtype)) for one in layers]
        call.schedule(layers[0])
    return graph_median([partial(call, one) for one in layers] * -(-16 // len(layers)), replays)


def time_ragged(
    call: Callable[[Inputs], Tensor], lengths: list[int], heads: int, dtype: torch.dtype = torch.bfloat16
) -> float:
    """As `time_mla` over these lengths; `dtype` of the cache."""
    return time_layers(call, ragged_layers(lengths, heads, dtype))


def ragged_rows(calls: list[tuple[str, Callable[[Inputs], Tensor]]], dtype: torch.dtype) -> Iterator[Row]:
    """Batches whose lengths differ; `dtype` of the cache."""
    cache = "" if dtype == torch.bfloat16 else ", e4m3 cache"
    for heads in HEADS:
        for name, lengths_of in RAGGED.items():
            for batch in RAGGED_BATCHES:
                lengths = lengths_of(batch)
                moved = sum(lengths) * ROW * dtype.itemsize + batch * heads * (ROW + LATENT) * 2
                flops = 2 * sum(lengths) * heads * (ROW + LATENT)
                for who, call in calls:
                    case = f"{heads} heads, B={batch}, {name}{cache}"
                    yield Row("mla_decode", case, who, time_ragged(call, lengths, heads, dtype), moved, flops, None)


def rows(with_peers: bool = True) -> Iterator[Row]:
    """Each shape, ours first."""
    calls: list[tuple[str, Callable[[Inputs], Tensor]]] = [("ours", ours)]
    if available():
        calls.append(("ours, by plan", by_plan))
    over_fp8 = list(calls)
    if with_peers:
        calls += peers()
        over_fp8 += peers(torch.float8_e4m3fn)
    yield from ragged_rows(calls, torch.bfloat16)
    yield from ragged_rows(over_fp8, torch.float8_e4m3fn)
    for heads in HEADS:
        for batch in BATCHES:
            for context in CONTEXTS:
                cached = batch * context
                moved, flops = (
                    cached * ROW * 2 + batch * heads * (ROW + LATENT) * 2,
                    2 * cached * heads * (ROW + LATENT),
                )
                for name, call in calls:
                    target = TARGETS.get((heads, batch)) if name == "ours" and context == 8192 else None
                    case = f"{heads} heads, B={batch}, T={context}"
                    yield Row("mla_decode", case, name, time_mla(call, batch, heads, context), moved, flops, target)
        fp8_cache = partial(random_inputs, dtype=torch.float8_e4m3fn)
        case = f"{heads} heads, B=64, T=8192, e4m3 cache"
        for name, call in over_fp8:
            time = time_mla(call, 64, heads, 8192, fp8_cache)
            yield Row("mla_decode", case, name, time, 64 * 8192 * ROW, 2 * 64 * 8192 * heads * (ROW + LATENT))
