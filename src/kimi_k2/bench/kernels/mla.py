"""Cases of MLA decode attention over a paged cache: ours, and what vLLM brings where it is installed.

Standard batches are even, or ragged as a server sees them; drawn ones have lengths from 1 to 131,072, 1 to 256
sequences, 8, 16 and 64 heads.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from kimi_k2.bench.kernels.harness import Case
from kimi_k2.bench.kernels.mla_peers import (
    OURS,
    PLANNED,
    ROUNDED,
    SOFTMAX_SCALE,
    Inputs,
    Kernel,
    check,
    peers,
    ragged_inputs,
)
from kimi_k2.kernels.attention import mla_cuda, tuning
from kimi_k2.kernels.attention.mla_cuda import FEW_HEADS
from kimi_k2.kernels.attention.mla_sizes import LATENT, PAGE, ROW
from kimi_k2.kernels.common.hardware import hopper

LONGEST = 65536  # of the standard batches
DRAWN_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 67, 96, 128, 140, 192, 256)
DRAWN_HEADS = (8, 16, 64)
DRAWN_LONGEST = 131072
# Cached rows of a drawn batch, so that two sets of inputs fit a GPU and many cases into minutes.
DRAWN_ROWS = 2**22


@dataclass(frozen=True)
class Batch:
    """A batch.

    Attributes:
        kind: how its lengths are distributed.
        lengths: rows of each sequence.
        heads: of the queries.
        fp8: the cache is e4m3.
    """

    kind: str
    lengths: tuple[int, ...]
    heads: int
    fp8: bool = False

    @property
    def name(self) -> str:
        """What a row of the table says."""
        cache = ", e4m3 cache" if self.fp8 else ""
        middle, longest = sorted(self.lengths)[len(self.lengths) // 2], max(self.lengths)
        return f"{self.heads} heads, B={len(self.lengths)}, {self.kind}, median {middle}, max {longest}{cache}"


def lengths_of(kind: str, count: int, top: int, draw: random.Random, most: int = DRAWN_LONGEST) -> list[int]:
    """`count` lengths from 1 to about `top`; lognormal ones to `most`."""
    if kind == "equal":
        return [top] * count
    if kind == "uniform":
        return [draw.randint(1, top) for _ in range(count)]
    if kind == "lognormal":
        return [max(1, min(most, int(draw.lognormvariate(math.log(top) - 1, 1.0)))) for _ in range(count)]
    long = draw.randint(1, max(1, count // 16))
    lengths = [top] * long + [draw.randint(1, 1 + top // 16) for _ in range(count - long)]
    draw.shuffle(lengths)
    return lengths


def standard() -> Iterator[Batch]:
    """Of each number of heads ragged batches over both caches, even ones, and an even one over e4m3."""
    for heads in (64, 8):
        for fp8, count in product((False, True), (16, 64, 128)):
            yield Batch("one long", (LONGEST, *[1024] * (count - 1)), heads, fp8)
            # The lognormal's median is 4,096.
            for kind, top in (("lognormal", 4096 * math.e), ("uniform", 32768)):
                lengths = lengths_of(kind, count, int(top), random.Random(count), LONGEST)
                yield Batch(kind, tuple(lengths), heads, fp8)
        for count, context in product((1, 16, 64), (1024, 8192, LONGEST)):
            yield Batch("equal", (context,) * count, heads)
        yield Batch("equal", (8192,) * 64, heads, fp8=True)


def drawn(count: int, seed: int) -> list[Batch]:
    """So many batches, the same for a seed: equal, uniform and lognormal lengths, and one or a few long among short."""
    draw = random.Random(seed)
    batches: list[Batch] = []
    while len(batches) < count:
        size, heads, fp8 = draw.choice(DRAWN_BATCHES), draw.choice(DRAWN_HEADS), draw.random() < 0.3
        kind = draw.choice(("equal", "uniform", "lognormal", "few long"))
        lengths = lengths_of(kind, size, int(2 ** draw.uniform(5, math.log2(DRAWN_LONGEST))), draw)
        if sum(lengths) <= DRAWN_ROWS:
            batches.append(Batch(kind, tuple(lengths), heads, fp8))
    return batches


def layers(batch: Batch) -> list[Inputs]:
    """As a model's layers: queries and caches of their own; lengths, pages and plan are the same, so stay in the L2."""
    dtype = torch.float8_e4m3fn if batch.fp8 else torch.bfloat16
    count = max(2, min(256, 2**28 // (sum(batch.lengths) * ROW * (1 if batch.fp8 else 2))))
    first = ragged_inputs(batch.lengths, batch.heads, dtype)
    queries = [torch.randn_like(first.q) for _ in range(count)]
    caches = [torch.randn(first.cache.shape, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(count)]
    return [replace(first, q=q, cache=cache) for q, cache in zip(queries, caches, strict=True)]


def ways(batch: Batch, others: Sequence[Kernel]) -> dict[str, list[partial[Tensor]]]:
    """By name the calls: ours as a decode step runs it, by the form that is not chosen, and the peers.

    At least 16 calls a graph, as a model has one a layer: a graph's own start, about 4 us, is no part of a call. Plans,
    one for all layers of a step, and queries rounded for a peer are made before.
    """
    inputs = layers(batch)
    capacity = -(-max(batch.lengths) // PAGE) * PAGE
    device = hopper(torch.cuda.current_device(), "mla_decode")
    choice = tuning.choose(len(batch.lengths), batch.heads, capacity, batch.fp8, *device)
    kernels = {"ours": OURS, "ours, by plan": PLANNED} if choice.splits else {"ours": PLANNED, "ours, even split": OURS}
    if batch.fp8 and not choice.splits:
        kernels["ours, e4m3 queries"] = ROUNDED
    made = {}
    for name, kernel in (kernels | {kernel.name: kernel for kernel in others}).items():
        cast_inputs = [replace(one, q=one.q.to(kernel.queries)) for one in inputs]
        try:
            plan = kernel.plan(cast_inputs[0])
        except RuntimeError:  # a peer may run once for it, and want more scratch memory than is left
            if name.startswith("ours"):
                raise
            continue
        made[name] = [partial(kernel.run, one, plan) for one in cast_inputs] * -(-16 // len(cast_inputs))
    return made


def splits(
    heads: int, fp8: bool, capacity: int, batch: int, kind: str
) -> dict[tuning.AttentionChoice, list[partial[Tensor]]]:
    """By choice the calls of a graph: the plan, even splits, and these with every 8 heads a request.

    Args:
        kind: "equal" contexts fill the capacity; of "uneven" ones one in eight does, the others a quarter of it.
    """
    lengths = [capacity if kind == "equal" or i % 8 == 0 else -(-capacity // 4) for i in range(batch)]
    inputs = layers(Batch(kind, tuple(lengths), heads, fp8))
    plan, made = PLANNED.plan(inputs[0]), {}
    if batch > 1:
        made[tuning.AttentionChoice(0, False)] = [partial(PLANNED.run, one, plan) for one in inputs]
    sm_count = hopper(torch.cuda.current_device(), "mla_decode")[1]
    for eights in (False, True) if heads > FEW_HEADS and batch * heads // FEW_HEADS <= sm_count else (False,):
        requests = batch * heads // FEW_HEADS if eights else batch
        most = max(1, min(64, sm_count // requests, capacity // PAGE))
        for count in sorted({1, 2, 3, 4, 8, 16, most} & set(range(1, most + 1))):
            made[tuning.AttentionChoice(count, eights)] = [
                partial(
                    mla_cuda.run, one.q.view(-1, FEW_HEADS, ROW) if eights else one.q, one.cache, one.seq_lens,
                    SOFTMAX_SCALE, one.block_table, count,
                )
                for one in inputs
            ]  # fmt: skip
    return {choice: calls * -(-16 // len(calls)) for choice, calls in made.items()}


def cases(with_peers: bool, batches: Sequence[Batch] | None = None) -> Iterator[Case]:
    """Each batch, standard ones if none are given; peers that can be imported are checked first."""
    others: dict[bool, list[Kernel]] = {False: [], True: []}
    if with_peers:
        for fp8, dtype in ((False, torch.bfloat16), (True, torch.float8_e4m3fn)):
            others[fp8] = list(peers(dtype))
            for peer, heads in product(others[fp8], (64, 8)):
                check(peer, ragged_inputs([1, 64, 700, 1024], heads, dtype))
    for batch in standard() if batches is None else batches:
        rows, queries = sum(batch.lengths), len(batch.lengths) * batch.heads * (ROW + LATENT)
        moved = rows * ROW * (1 if batch.fp8 else 2) + queries * 2
        flops = 2 * rows * batch.heads * (ROW + LATENT)
        yield Case("mla_decode", batch.name, ways(batch, others[batch.fp8]), moved, flops)
