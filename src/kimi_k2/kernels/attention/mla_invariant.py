"""MLA attention in batch-invariant mode.

Decode: `torch.ops.kimi_k2.mla_plan_by_length` cuts a context by its own length alone, and `mla_decode` follows this
plan; csrc/mla_plan_by_length.cuh says how. Prompts: `mla_prefill`'s kernel, which passes over the slots from the first
one on. Slots that a query does not see add exact zeros, but blocks with such slots are computed by other code than
those without: without fused multiply-adds both round alike.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.attention import mla_cuda, mla_decode, mla_plan, mla_prefill
from kimi_k2.kernels.attention.mla_sizes import PAGE
from kimi_k2.kernels.common.build import find_nvcc
from kimi_k2.kernels.common.hardware import hopper
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.linear import dense_gemm


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
        return min(mla_cuda.MAX_SPLITS, -(-units // self.few_each) if units <= self.whole else more)


# By whether there are 8 heads, whose parts cost less to store and merge.
CUTS = {True: Cut(2, 16, 8, 6, 3), False: Cut(4, 16, 4, 8, 6)}


def plan_rows(batch: int, capacity: int, blocks: int, heads: int) -> int:
    """Rows of a plan, at least `mla_plan`'s."""
    items = batch * CUTS[heads <= mla_cuda.MOST_FEW_HEADS].parts(-(-capacity // PAGE))
    return max(mla_cuda.rows_before_items(batch, blocks) + items, mla_plan.plan_rows(batch, blocks))


def _rows(seq_lens: Tensor, capacity: int, heads: int) -> Tensor:
    mla_plan.check(seq_lens, heads)
    blocks = hopper(seq_lens.device.index, "mla_plan")[1] if seq_lens.is_cuda else 132
    return seq_lens.new_empty(plan_rows(seq_lens.shape[0], capacity, blocks, heads), 4)


@kernel_operation("mla_plan_by_length")
def mla_plan_by_length(seq_lens: Tensor, capacity: int, heads: int) -> Tensor:
    """The plan for `mla_decode` in which how a context is cut depends on its own length alone.

    Args:
        seq_lens, capacity, heads: as `mla_plan` takes them.

    Returns:
        int32 [`plan_rows`, 4].

    Raises:
        KernelError: a shape or dtype that the kernel does not take, or a failed launch.
    """
    plan, few = _rows(seq_lens, capacity, heads), heads <= mla_cuda.MOST_FEW_HEADS
    batch, blocks = seq_lens.shape[0], hopper(seq_lens.device.index, "mla_plan")[1]
    sizes = batch, capacity, blocks, mla_plan.SOME_PARTS[few], *astuple(CUTS[few])
    launch("attention/mla_plan", "kimi_mla_plan_by_length", "mla_plan", seq_lens.device, seq_lens, plan, *sizes)
    return plan


mla_plan_by_length.fake(_rows)


def supports_decode(query: Tensor, cache: Tensor, seq_lens: Tensor, block_table: Tensor | None) -> bool:
    """What `mla_decode` takes, of a batch that a plan serves."""
    fits = mla_decode.supports(query, cache, seq_lens, block_table)
    return fits and mla_cuda.capacity_of(cache, block_table) > 0 and 0 < query.shape[0] <= mla_plan.MAX_BATCH


def decode(
    query: Tensor, cache: Tensor, seq_lens: Tensor, softmax_scale: float, plan: Tensor | None,
    block_table: Tensor | None,
) -> Tensor:  # fmt: skip
    """`mla_decode` of one query a sequence by a plan of `mla_plan_by_length`, which is made if it is not given.

    Raises:
        KernelError: a shape or dtype that the kernel does not take, or a failed launch.
    """
    mla_decode.check_arguments(query, cache, seq_lens, block_table)
    if plan is None:
        plan = mla_plan_by_length(seq_lens, mla_cuda.capacity_of(cache, block_table), query.shape[1])
    mla_decode.check_plan(query, plan)
    return mla_cuda.run_planned(query, cache, seq_lens, softmax_scale, block_table, plan, uniform=True)


def supports_prefill(
    q_nope: Tensor, q_rope: Tensor, cache: Tensor, kv_b: Tensor, positions: Tensor, softmax_scale: float
) -> bool:
    """What `mla_prefill` takes, and nvcc for the keys and values."""
    fits = mla_prefill.supports_mla_naive_attention(q_nope, q_rope, cache, kv_b, positions, softmax_scale)
    return fits and find_nvcc() is not None


def prefill(
    q_nope: Tensor, q_rope: Tensor, cache: Tensor, kv_b: Tensor, positions: Tensor, softmax_scale: float
) -> Tensor:
    """`ops.mla.mla_naive_attention`, its arguments.

    Raises:
        KernelError: a shape or dtype that the kernels do not take, or a failed launch.
    """
    (batch, slots), heads = cache.shape[:2], len(kv_b)
    if kv_b.dtype != torch.bfloat16:
        raise KernelError(f"kv_b is {kv_b.dtype}, expected torch.bfloat16")
    latents = cache[..., : mla_prefill.RANK].reshape(-1, mla_prefill.RANK)  # of one prompt without a copy
    expanded = dense_gemm.dense_gemm(latents, kv_b.reshape(-1, mla_prefill.RANK).contiguous(), 1)
    expanded = expanded.view(batch, slots, heads, -1).transpose(1, 2)
    if slots * expanded.stride(2) >= 2**31:  # the kernel reckons offsets of slots in 32 bits
        expanded = expanded.contiguous()
    return mla_prefill.run(
        q_nope, q_rope, expanded, cache, positions, softmax_scale, mla_prefill.LAUNCH, enable_fp_fusion=False
    )
