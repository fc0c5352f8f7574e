"""Shares MLA decode attention's work out by the lengths, on the device: `torch.ops.kimi_k2.mla_plan`.

Splitting every context into the same number of parts leaves most of the GPU idle behind one long context. A plan says
for each thread block which parts of which contexts it takes one after another, so that all blocks end at about the same
time (csrc/mla_plan.cu). It depends on the lengths alone: one plan, made once a step, serves the attention of all
layers, and a captured CUDA graph makes it anew at every replay.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace

import torch
from torch import Tensor

from kimi_k2.kernels.attention.mla_cuda import CUT_FROM, MAX_SPLITS, MOST_FEW_HEADS, rows_before_items
from kimi_k2.kernels.attention.mla_sizes import HEADS, PAGE
from kimi_k2.kernels.common.hardware import hopper
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation

MAX_BATCH = 1024
PLANNED_ALONE = 2**15  # rows
# The same as `CUT_FROM` where there are too many contexts for two parts each.
CUT_MANY_FROM = 256


@dataclass(frozen=True)
class Costs:
    """Microseconds on an H200 that a plan is chosen by.

    Attributes:
        unit: a block's time for 64 rows that it need not share memory's bandwidth for.
        memory: the whole GPU's time to read 64 rows.
        item: what a part of a context costs its block beside its rows.
        traffic: the whole GPU's time to write and read a part.
        merge: merging, and
        part: each part of the context that has the most.
    """

    unit: float
    memory: float
    item: float
    traffic: float
    merge: float
    part: float


# (8 or 16 heads, e4m3 cache) -> costs; over such a cache those of queries in two terms (csrc/mla_fp8.cuh).
COSTS = {
    (True, False): Costs(1.55, 0.0164, 1.2, 0.0075, 1.5, 0.03),
    (False, False): Costs(1.9, 0.0164, 3.0, 0.03, 2.0, 0.05),
    (True, True): Costs(1.4, 0.0084, 1.5, 0.006, 1.5, 0.03),
    (False, True): Costs(1.3, 0.0084, 4.0, 0.015, 2.0, 0.05),
}

# 8 or 16 heads -> costs over an e4m3 cache with rounded queries (csrc/mla_fp8.cuh).
ROUNDED_COSTS = {
    True: Costs(1.2, 0.0084, 1.5, 0.006, 1.5, 0.03),
    False: Costs(1.25, 0.0084, 3.0, 0.015, 2.0, 0.05),
}


# Parts from which several groups of threads share a merge: with 8 and 16 heads it has few columns.
SOME_PARTS = {True: 5, False: 9}


def uncut(batch: int, capacity: int, heads: int, sm_count: int = 132) -> bool:
    """Whether no context is cut, so that no merge follows: one that fills the capacity takes less time than a merge."""
    many = 2 * batch > sm_count and heads > MOST_FEW_HEADS
    return capacity <= (CUT_MANY_FROM if many else CUT_FROM)


def pays(batch: int, capacity: int, heads: int, sm_count: int = 132) -> bool:
    """Whether a plan is worth its launch.

    For several sequences, unless each has a block of its own and none is cut, and for one that may have more than 64
    parts.
    """
    if batch == 1:
        return capacity >= PLANNED_ALONE
    short = batch <= sm_count and uncut(batch, capacity, heads, sm_count)
    return 1 < batch <= MAX_BATCH and capacity > 0 and not short


def plan_rows(batch: int, blocks: int) -> int:
    """Rows of a plan for so many contexts and blocks, as csrc/mla_plan.cuh says."""
    return rows_before_items(batch, blocks) + batch + blocks


def costs_of(batch: int, capacity: int, heads: int, quantized: bool, rounded: bool = False) -> Costs:
    """What a plan is chosen by; where no context is to be cut a merge costs too much for any plan that cuts one."""
    few = heads <= MOST_FEW_HEADS
    costs = ROUNDED_COSTS[few] if quantized and rounded else COSTS[few, quantized]
    return replace(costs, merge=math.inf) if uncut(batch, capacity, heads) else costs


LENGTHS = f"seq_lens i32[B] -> plan i32[R,4]; 1 <= B <= {MAX_BATCH}; heads in {HEADS}"


def _blocks(device: torch.device) -> int:
    """SMs; of a plan without data an H200's."""
    return hopper(device.index, "mla_plan")[1] if device.type == "cuda" and torch.cuda.is_available() else 132


@kernel_operation("mla_plan", LENGTHS, also=lambda B, device: {"R": plan_rows(B, _blocks(device))})
def mla_plan(
    seq_lens: Tensor, capacity: int, heads: int, quantized: bool = False, rounded: bool = False, *, plan: Tensor
) -> None:
    """The plan for `mla_decode` over contexts of these lengths.

    Args:
        capacity: rows that the cache can hold of a sequence; longer lengths are clamped to it.
        heads: of the queries; 8 and 16 have a kernel of their own, with costs of its own. Of several queries a sequence
            `folding(tokens, heads).rows`, and seq_lens are `request_lengths`.
        quantized: the cache is e4m3.
        rounded: the plan is for `mla_decode` with `rounded`.

    Returns:
        int32 [`plan_rows`, 4], as csrc/mla_plan.cuh says.
    """
    batch, device, few = seq_lens.shape[0], seq_lens.device, heads <= MOST_FEW_HEADS
    sizes = batch, capacity, _blocks(device), SOME_PARTS[few]
    costs = astuple(costs_of(batch, capacity, heads, quantized, rounded))
    launch("attention/mla_plan", "kimi_mla_plan", "mla_plan", device, seq_lens, plan, *sizes, *costs)


@dataclass(frozen=True)
class Cut:
    """How many parts a context has, by its units of 64 rows.

    Attributes:
        few_each: units of a part up to `whole` of them.
        whole: see there.
        first_parts: parts of a context of `whole` units.
        more_each: beyond, units for each further part.
        item: what a part costs its block beside its units, which cost 4 each.
    """

    few_each: int
    whole: int
    first_parts: int
    more_each: int
    item: int

    def parts(self, units: int) -> int:
        """Of so many units, as csrc/mla_plan_by_length.cuh counts them."""
        more = self.first_parts + (units - self.whole) // self.more_each
        return min(MAX_SPLITS, -(-units // self.few_each) if units <= self.whole else more)


# By whether there are 8 heads, whose parts cost less to store and merge.
CUTS = {True: Cut(2, 16, 8, 6, 3), False: Cut(4, 16, 4, 8, 6)}


def rows_by_length(batch: int, capacity: int, blocks: int, heads: int) -> int:
    """Rows of a plan, at least `mla_plan`'s."""
    items = batch * CUTS[heads <= MOST_FEW_HEADS].parts(-(-capacity // PAGE))
    return max(rows_before_items(batch, blocks) + items, plan_rows(batch, blocks))


@kernel_operation(
    "mla_plan_by_length",
    LENGTHS,
    also=lambda B, capacity, heads, device: {"R": rows_by_length(B, capacity, _blocks(device), heads)},
)
def mla_plan_by_length(seq_lens: Tensor, capacity: int, heads: int, *, plan: Tensor) -> None:
    """The plan of batch-invariant mode: how a context is cut depends on its own length alone.

    csrc/mla_plan_by_length.cuh says how.

    Args:
        seq_lens, capacity, heads: as `mla_plan` takes them.

    Returns:
        int32 [`rows_by_length`, 4].
    """
    few, device = heads <= MOST_FEW_HEADS, seq_lens.device
    sizes = seq_lens.shape[0], capacity, _blocks(device), SOME_PARTS[few], *astuple(CUTS[few])
    launch("attention/mla_plan", "kimi_mla_plan_by_length", "mla_plan", device, seq_lens, plan, *sizes)
