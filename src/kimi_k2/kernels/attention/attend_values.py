"""MLA attention and W_UV behind it at decode, for a few tokens, in two launches: `torch.ops.kimi_k2.attend_values`.

`mla_decode` and `value_rows` in one operation: the launch that joins the parts of the context goes on with W_UV.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kimi_k2.kernels.attention import mla_cuda, mla_decode, mla_plan, value_rows
from kimi_k2.kernels.attention.mla_sizes import ROW
from kimi_k2.kernels.common.hardware import hopper
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation


def supports(query: Tensor, *others: Any, **named: Any) -> bool:
    """As many tokens as `value_rows` is chosen for."""
    return len(query) <= value_rows.MAX_TOKENS and attend_values.takes(query, *others, **named)


@kernel_operation(
    "attend_values",
    f"query bf16[B,H,576], {mla_decode.CACHED}, w_uv bf16[H,128,512] -> out bf16[B,128*H]; {mla_decode.LIMITS};"
    " cache.dtype == bf16",
)
def attend_values(
    query: Tensor,
    cache: Tensor,
    seq_lens: Tensor,
    w_uv: Tensor,
    softmax_scale: float,
    plan: Tensor | None = None,
    block_table: Tensor | None = None,
    uniform: bool = False,
    *,
    out: Tensor,
) -> Tensor | None:
    """`value_rows(mla_decode(query, cache, seq_lens, softmax_scale, plan=plan), w_uv)`.

    Args:
        query, cache, seq_lens, softmax_scale, plan, block_table: as `mla_decode` takes them; a bfloat16 cache.
        uniform: with a plan of 8 heads, join a context's parts in the steps of `mla_cuda.run_planned`'s `uniform`.

    Returns:
        The latents in between are rounded to bfloat16.
    """
    (batch, heads) = query.shape[:2]
    capacity = mla_cuda.capacity_of(cache, block_table)
    few, sm_count = mla_cuda.FEW_HEADS, hopper(query.device.index, "attend_values")[1]
    splits = mla_cuda.choose_splits(batch * heads // few, capacity, sm_count)
    even = plan is None and splits > 1 and mla_cuda.divides_heads(batch, heads, capacity)
    if not (even or (plan is not None and heads == few)) or not capacity:
        latent = mla_decode.mla_decode(query, cache, seq_lens, softmax_scale, block_table, plan=plan)
        return value_rows.value_rows(latent, w_uv)
    rows, how = query.view(-1, few, ROW), {"splits": splits} if plan is None else {"plan": plan}
    if plan is not None:
        mla_decode.check_plan(query, plan)
    parts = mla_cuda.parts_of(rows, len(rows) * splits if plan is None else mla_cuda.plan_items(query, plan))
    mla_cuda.launch_attention(rows, cache, seq_lens, softmax_scale, block_table, 1.0, parts, **how)
    operands = *parts, w_uv, out, plan
    sizes = batch, heads, splits, mla_plan.SOME_PARTS[True] if uniform else 0
    launch("attention/attend_values", "kimi_join_values", "attend_values", query.device, *operands, *sizes)
    return None
