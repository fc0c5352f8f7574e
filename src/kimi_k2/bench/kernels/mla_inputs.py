"""Inputs of MLA decode attention over a paged cache, for the benchmarks: random ones of equal and of uneven lengths."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_k2.kernels.attention.mla_plan import available, mla_plan
from kimi_k2.kernels.attention.mla_sizes import PAGE, ROW

SOFTMAX_SCALE = 192**-0.5


@dataclass(frozen=True)
class Inputs:
    """`mla_decode`'s tensors; the pages are shuffled."""

    q: Tensor
    cache: Tensor
    seq_lens: Tensor
    block_table: Tensor
    plan: Tensor | None = None


def ragged_inputs(lengths: list[int], heads: int, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Sequences of these lengths, pages shuffled, and their plan."""
    pages = [-(-length // PAGE) for length in lengths]
    numbers = torch.randperm(sum(pages)).int().split(pages)
    table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
    for row, held in zip(table, numbers, strict=True):
        row[: len(held)] = held
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return Inputs(
        torch.randn(len(lengths), heads, ROW, device="cuda", dtype=torch.bfloat16),
        torch.randn(sum(pages), PAGE, ROW, device="cuda", dtype=torch.bfloat16).to(dtype),
        seq_lens,
        table.cuda(),
        mla_plan(seq_lens, max(pages) * PAGE, heads, dtype != torch.bfloat16) if available() else None,
    )


def random_inputs(
    batch: int, heads: int, context: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
) -> Inputs:
    """Every sequence of `context` rows, values of deviation 1; `dtype` of the cache."""
    pages = -(-context // PAGE)
    table = torch.randperm(batch * pages, device=device).view(batch, pages).int()
    seq_lens = torch.full((batch,), context, dtype=torch.int32, device=device)
    plans = seq_lens.is_cuda and available()
    return Inputs(
        torch.randn(batch, heads, ROW, device=device, dtype=torch.bfloat16),
        torch.randn(batch * pages, PAGE, ROW, device=device, dtype=torch.bfloat16).to(dtype),
        seq_lens,
        table,
        mla_plan(seq_lens, pages * PAGE, heads, dtype != torch.bfloat16) if plans else None,
    )
