"""The attention kernels in the table of operations, with the plain functions' arguments."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from kimi_k2.kernels.attention import attend_values as attend
from kimi_k2.kernels.attention import (
    mla_cuda,
    mla_decode,
    mla_plan,
    mla_prefill,
    tuning,
    value_rows,
)
from kimi_k2.kernels.attention import query as query_kernel
from kimi_k2.kernels.attention.mla_sizes import CACHE_DTYPES, HEADS, LATENT
from kimi_k2.kernels.common.hardware import hopper, runs_cuda
from kimi_k2.ops import mla as ops_mla
from kimi_k2.ops.linear import Weight
from kimi_k2.ops.registry import BY_ROW, batch_invariant

OWN_LENGTH = "parts of a context by its own length, merged in their order"
FIRST_ON = "slots from the first one on, by one block"

ops_mla.mla_naive_attention.entry(
    "mla_prefill", takes=mla_prefill.supports_mla_naive_attention, batch_invariant=FIRST_ON
)(mla_prefill.mla_naive_attention)
ops_mla.mla_ragged_attention.entry("mla_prefill", takes=mla_prefill.supports_ragged, batch_invariant=FIRST_ON)(
    mla_prefill.mla_ragged_attention
)


def _supports_plan(seq_lens: Tensor, cache: Tensor, heads: int, block_table: Tensor | None = None) -> bool:
    """What the tuned choice plans; in batch-invariant mode all."""
    batch, capacity = seq_lens.shape[0], mla_cuda.capacity_of(cache, block_table)
    fits = (
        runs_cuda(cache.device) and heads in HEADS and cache.dtype in CACHE_DTYPES and 0 < batch <= mla_plan.MAX_BATCH
    )
    if not fits or batch_invariant():
        return fits
    device = hopper(cache.device.index, "mla_plan")
    return capacity > 0 and not tuning.choose(batch, heads, capacity, cache.dtype != torch.bfloat16, *device).splits


def attention_plan(
    seq_lens: Tensor, cache: Tensor, heads: int, block_table: Tensor | None = None, *, rounded: bool = False
) -> Tensor | None:
    """`mla_plan`, in batch-invariant mode `mla_plan_by_length`; `rounded` as there."""
    capacity = mla_cuda.capacity_of(cache, block_table)
    if batch_invariant():
        return mla_plan.mla_plan_by_length(seq_lens, capacity, heads)
    return mla_plan.mla_plan(seq_lens, capacity, heads, cache.dtype != torch.bfloat16, rounded)


ops_mla.attention_plan.entry("e4m3", takes=_supports_plan, joins={"mla_decode": "e4m3"}, optional=True)(
    partial(attention_plan, rounded=True)
)
ops_mla.attention_plan.entry(
    "mla_plan", takes=_supports_plan, joins={"mla_decode": "mla_decode"}, batch_invariant=OWN_LENGTH
)(attention_plan)


def _supports_mla_decode(
    query: Tensor, cache: Tensor, seq_lens: Tensor, softmax_scale: float, rank: int, plan: Tensor | None = None,
    block_table: Tensor | None = None, lse: Tensor | None = None,
) -> bool:  # fmt: skip
    if rank != LATENT or not mla_decode.mla_decode.takes(query, cache, seq_lens, softmax_scale, block_table):
        return False
    # In batch-invariant mode by a plan alone, which serves no empty cache; no engine asks for the logarithms there.
    planned = lse is None and 0 < len(query) <= mla_plan.MAX_BATCH and mla_cuda.capacity_of(cache, block_table) > 0
    return planned or not batch_invariant()


def decode_attention(
    query: Tensor, cache: Tensor, seq_lens: Tensor, softmax_scale: float, rank: int, plan: Tensor | None = None,
    block_table: Tensor | None = None, lse: Tensor | None = None, *, rounded: bool = False,
) -> Tensor:  # fmt: skip
    """`mla_decode`.

    `rounded`: over an e4m3 cache, queries are rounded to e4m3 too, of 8 heads weights as well, by a plan.
    """
    if batch_invariant():
        if plan is None:
            plan = mla_plan.mla_plan_by_length(seq_lens, mla_cuda.capacity_of(cache, block_table), query.shape[1])
        mla_decode.check_plan(query, plan)
        return mla_cuda.run_planned(query, cache, seq_lens, softmax_scale, block_table, plan, uniform=True)
    arguments = query, cache, seq_lens, softmax_scale, block_table
    return mla_decode.mla_decode(*arguments, plan=plan, rounded=rounded, lse=lse)


ops_mla.mla_decode.entry("mla_decode", takes=_supports_mla_decode, batch_invariant=OWN_LENGTH)(decode_attention)
ops_mla.mla_decode.entry("e4m3", takes=_supports_mla_decode, optional=True)(partial(decode_attention, rounded=True))


def _supports_values(latent: Tensor, w_uv: Tensor) -> bool:
    most = mla_plan.MAX_BATCH if batch_invariant() else value_rows.MAX_TOKENS
    return len(latent) <= most and value_rows.value_rows.takes(latent, w_uv)


ops_mla.value_rows.entry("cuda", takes=_supports_values, batch_invariant=BY_ROW)(value_rows.value_rows)
ops_mla.value_rows.entry("batched", takes=value_rows.supports_batched)(value_rows.batched_value_rows)


ops_mla.attend_values.entry("cuda", takes=attend.supports, joins={"mla_decode": "mla_decode", "value_rows": "cuda"})(
    attend.attend_values
)


def _supports_uniform(query: Tensor, *others: Any) -> bool:
    """A few sequences in batch-invariant mode, by its plan."""
    planned = others[4:] and others[4] is not None and query.shape[1] == mla_cuda.FEW_HEADS
    return bool(planned) and batch_invariant() and attend.supports(query, *others)


ops_mla.attend_values.entry(
    "uniform",
    takes=_supports_uniform,
    joins={"mla_decode": "mla_decode", "value_rows": "cuda"},
    batch_invariant=OWN_LENGTH,
)(partial(attend.attend_values, uniform=True))


ops_mla.absorb_and_store.entry(
    "absorb",
    takes=lambda *given: batch_invariant() and query_kernel.absorb.takes(*given),
    batch_invariant="64 columns of a head together, always",
)(query_kernel.absorb)


def _stored(q_b: Weight) -> tuple[Tensor, Tensor | None]:
    return q_b.tensors["weight"], q_b.tensors.get("weight_scale_inv")


def _supports_query(qkv_a: Tensor, q_norm: Tensor, q_b: Weight, *others: Any) -> bool:
    """FP8 blocks, or BF16."""
    known = q_b.fp8_block == (128, 128) or q_b.quantization is None
    return known and query_kernel.query_and_entry.takes(qkv_a, q_norm, *_stored(q_b), *others)


@ops_mla.query_and_entry.entry(
    "cuda", takes=_supports_query, joins={"project": "fused_linear", "absorb_and_store": "triton"}
)
def query_and_entry(
    qkv_a: Tensor, q_norm: Tensor, q_b: Weight, kv_norm: Tensor, cos: Tensor, sin: Tensor, slots: Tensor,
    w_uk: Tensor, cache: Tensor, q_eps: float, kv_eps: float,
) -> Tensor:  # fmt: skip
    """`query_and_entry` of an FP8 or BF16 q_b."""
    return query_kernel.query_and_entry(
        qkv_a, q_norm, *_stored(q_b), kv_norm, cos, sin, slots, w_uk, cache, q_eps, kv_eps
    )
