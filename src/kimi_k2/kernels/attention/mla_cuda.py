"""MLA decode attention in CUDA C++: what `torch.ops.kimi_k2.mla_decode` runs where nvcc is found.

csrc/mla_attend.cuh and, for 8 and 16 heads, mla_few_heads.cuh say how a block works. The split of the context and the
merge of its parts are `mla_decode`'s: by the shapes alone, lengths read on the device, parts merged in a fixed order.
The tensor maps are kernel parameters, encoded on every call: a captured CUDA graph keeps them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.attention.mla_sizes import LATENT, LOG2_E, PAGE, ROW
from kimi_k2.kernels.common.hardware import hopper
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.structure import structure

MAX_SPLITS = 128
FEW_HEADS = 8
# Up to so many heads cache rows, not heads, lie along the matrix instruction's 64 rows.
MOST_FEW_HEADS = 16
# Longer contexts are cut: two steps of 64 rows take less time than a merge.
CUT_FROM = 128
# Cache rows that may come from the L2 a second time for one launch less: 19 MB, which take about 4 us.
READ_AGAIN = 2**14


_Arguments = structure("attention/csrc/mla.cuh", "Arguments")


def choose_splits(batch: int, capacity: int, sm_count: int = 132) -> int:
    """Parts of the context for the shapes: one wave of blocks, none with less than one step of 64 rows.

    A context of two steps is not worth a merge.
    """
    return 1 if capacity <= CUT_FROM else max(1, min(sm_count // max(1, batch), 64, -(-capacity // PAGE)))


def capacity_of(cache: Tensor, block_table: Tensor | None) -> int:
    """Slots that the cache can hold of a sequence, in one piece or in pages of 64."""
    return cache.shape[1] if block_table is None else block_table.shape[1] * PAGE


def by_eights(batch: int, heads: int, capacity: int, sm_count: int = 132) -> bool:
    """Whether a block should take 8 heads of a sequence, not all: contexts are short and there are SMs enough."""
    return heads > FEW_HEADS and batch * heads // FEW_HEADS <= sm_count and divides_heads(batch, heads, capacity)


def divides_heads(batch: int, heads: int, capacity: int) -> bool:
    """Whether heads by eights, each of which reads the cache again, are faster than all at once."""
    return heads % FEW_HEADS == 0 and (heads // FEW_HEADS - 1) * batch * capacity <= READ_AGAIN


def parts_of(q: Tensor, count: int, terms: int = 0) -> tuple[Tensor, Tensor]:
    """What `count` parts of contexts and their sums are left in, for all heads of q [B, H, 576].

    8 and 16 heads: float32, normalised, and base-2 logarithms, of an even split head by head. More heads: as
    csrc/mla_store.cuh says, float16 with a power of two beside each logarithm, for each half of the columns. With
    `terms` float16, and for each head the logarithm beside the power of two.
    """
    heads, few = q.shape[1], not terms and q.shape[1] <= MOST_FEW_HEADS
    values = q.new_empty(count, heads, LATENT, dtype=torch.float32 if few else torch.float16)
    return values, q.new_empty(count, heads * (1 if few else 2 if terms else 4), dtype=torch.float32)


def launch_attention(
    q: Tensor, cache: Tensor, seq_lens: Tensor, softmax_scale: float, block_table: Tensor | None, cache_scale: float,
    parts: tuple[Tensor, Tensor] | None, terms: int = 0, **others: Any,
) -> None:  # fmt: skip
    """`kimi_mla_decode`, with `terms` `kimi_mla_fp8`; `others` are further fields of `mla::Arguments`."""
    batch, fp8_cache, plan = q.shape[0], cache.dtype != q.dtype, others.get("plan")
    value_scale = cache_scale if fp8_cache else 1.0
    sequences, pages = (cache.shape[0], 0) if block_table is None else block_table.shape
    rows, sums = parts or (None, None)
    blocks = 0 if plan is None else hopper(q.device.index, "mla_decode")[1]
    arguments = _Arguments(
        table=block_table, lengths=seq_lens, parts=rows, sums=sums, cache=cache, rows=cache.numel() // ROW, batch=batch,
        heads=q.shape[1], table_stride=pages, capacity=capacity_of(cache, block_table),
        share=batch // seq_lens.shape[0], row_share=batch // sequences, scale=softmax_scale * LOG2_E * value_scale,
        value_scale=value_scale, blocks=blocks, sm_count=blocks, **{"tokens": 1, **others},
    )  # fmt: skip
    if terms:
        launch("attention/mla_fp8", "kimi_mla_fp8", "mla_decode", q.device, q, arguments, terms)
        return
    joins = arguments.out is not None
    launch("attention/mla_decode", "kimi_mla_decode", "mla_decode", q.device, q, arguments, fp8_cache, joins)


def run(
    q: Tensor,
    cache: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    block_table: Tensor | None,
    splits: int,
    cache_scale: float = 1.0,
    tokens: int = 1,
    lse: Tensor | None = None,
) -> Tensor:
    """`mla_decode` with the parts of the context pinned, other arguments unchecked; `tokens` as `folded` says.

    Raises:
        KernelError: splits are not 1 to 128, there is no CUDA compiler, or the launch failed.
    """
    if not 1 <= splits <= MAX_SPLITS:
        raise KernelError(f"{splits} parts: expected splits 1 to {MAX_SPLITS}")
    batch, heads = q.shape[:2]
    out = q.new_empty(batch, heads, LATENT)
    if batch == 0:
        return out
    if cache.numel() == 0 or (block_table is not None and block_table.shape[1] == 0):
        if lse is not None:
            lse.fill_(-torch.inf)
        return out.zero_()
    parts = parts_of(q, batch * splits) if splits > 1 else None
    given = q, cache, seq_lens, softmax_scale, block_table, cache_scale, parts
    launch_attention(*given, splits=splits, out=out, tokens=tokens, lse=lse)
    return out


def run_planned(
    q: Tensor, cache: Tensor, seq_lens: Tensor, softmax_scale: float, block_table: Tensor | None, plan: Tensor,
    cache_scale: float = 1.0, terms: int = 0, **others: Any,
) -> Tensor:  # fmt: skip
    """`mla_decode` with the work shared out by a plan, arguments unchecked.

    Args:
        terms: over an e4m3 cache queries, of 8 heads weights too, come to e4m3 (csrc/mla_fp8.cuh), head by head, times
            a power of two that brings the largest value into its upper range. In two terms they keep bfloat16's bits;
            in one results are 3.3 to 3.7 % off over values of a normal distribution. 0 converts the cache.
        others: `tokens` as `folded` says; `uniform`: merge a context's parts in the same steps whatever the number of
            contexts; `whole`: the plan cuts no context, so that nothing is merged; `lse` as `mla_decode` takes it.

    Raises:
        KernelError: a scale is not positive where there are terms, there is no CUDA compiler, or the launch failed.
    """
    if terms and not softmax_scale * cache_scale > 0:
        raise KernelError(f"softmax_scale {softmax_scale}, cache_scale {cache_scale}: expected positive ones")
    out = q.new_empty(*q.shape[:2], LATENT)
    parts = None if others.get("whole") else parts_of(q, plan_items(q, plan), terms)
    given = q, cache, seq_lens, softmax_scale, block_table, cache_scale, parts
    launch_attention(*given, terms, out=out, plan=plan, **others)
    return out


def rows_before_items(batch: int, blocks: int) -> int:
    """Rows of a plan that lie before its items, as csrc/mla_plan.cuh says."""
    return 2 * batch + blocks // 4 + 1


def plan_items(q: Tensor, plan: Tensor) -> int:
    """Items that a plan for q [B, H, 576] has room for."""
    return plan.shape[0] - rows_before_items(q.shape[0], hopper(q.device.index, "mla_decode")[1])
