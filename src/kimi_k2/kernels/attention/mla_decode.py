"""MLA decode attention over the compressed cache: `torch.ops.kimi_k2.mla_decode`.

Stands for `ops.mla.mla_absorbed_attention` at one query a sequence: every head reads the same cache row
(512 latent | 64 rotated), whose latent is key and value. The context is split over thread blocks, by the shapes alone,
so that a captured CUDA graph serves every length; the lengths are read on the device. The parts are joined in a fixed
order: the same inputs give the same bits. The kernel is CUDA C++ (`mla_cuda`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.attention import mla_cuda, mla_plan, tuning
from kimi_k2.kernels.attention.mla_sizes import HEADS, LATENT, PAGE, ROW
from kimi_k2.kernels.common.hardware import hopper
from kimi_k2.kernels.common.line import Line
from kimi_k2.kernels.common.operation import kernel_operation

# A block of rows read whole must not run into the next sequence, so without pages sequences are the cache's.
CACHED = f"cache bf16|e4m3[N,R,{ROW}], seq_lens i32[B], block_table i32[B,W]?"
LIMITS = f"H in {HEADS}; N == B if block_table is None else R == {PAGE}; N * R < 2**31"
PLAN = Line(f"q bf16[B,H,{ROW}], plan i32[L,4]; L >= rows")


def check_plan(q: Tensor, plan: Tensor) -> None:
    """KernelError unless it can be the plan of so many requests, on their device."""
    rows = mla_plan.plan_rows(q.shape[0], hopper(q.device.index, "mla_decode")[1])
    PLAN.bind({"q": q, "plan": plan, "rows": rows})


MAX_TOKENS = 8


@dataclass(frozen=True)
class Folding:
    """How several queries a sequence become requests of the kernel: tokens stand for heads, up to 64 rows together.

    Attributes:
        tokens: of a request, each of which sees one row more than the one before.
        requests: of a sequence; their lengths differ by `tokens`.
        padding: zero queries before the first, that tokens and heads come to 8, 16, 32 or 64.
        rows: tokens times heads.
    """

    tokens: int
    requests: int
    padding: int
    rows: int


def folding(tokens: int, heads: int) -> Folding:
    """The folding of so many queries a sequence.

    Raises:
        KernelError: more than 8 queries, or a number of heads that the kernel does not take.
    """
    if heads not in HEADS or not 1 <= tokens <= MAX_TOKENS:
        raise KernelError(f"{tokens} queries of {heads} heads: expected 1 to {MAX_TOKENS} of {HEADS}")
    together = min(1 << (tokens - 1).bit_length(), HEADS[-1] // heads)
    requests = -(-tokens // together)
    return Folding(together, requests, requests * together - tokens, together * heads)


def request_lengths(seq_lens: Tensor, tokens: int, heads: int) -> Tensor:
    """int32 [B * requests]: rows that each request's last token sees; what `mla_plan` plans for."""
    fold = folding(tokens, heads)
    if fold.requests == 1:
        return seq_lens
    behind = torch.arange(fold.requests - 1, -1, -1, dtype=torch.int32, device=seq_lens.device) * fold.tokens
    return (seq_lens[:, None] - behind).clamp_min(0).flatten()


@kernel_operation(
    "mla_decode",
    f"q bf16[*S,H,{ROW}], {CACHED}, lse f32[*S,H]? -> out bf16[*S,H,{LATENT}]; len(S) < 3 and S[:1] == (B,);"
    f" 1 <= S[len(S) - 1] <= {MAX_TOKENS} or len(S) == 1; lse is None or len(S) == 1; {LIMITS}",
    mutates_args=("lse",),
)
def mla_decode(
    q: Tensor,
    cache: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    block_table: Tensor | None = None,
    cache_scale: float = 1.0,
    plan: Tensor | None = None,
    rounded: bool = False,
    lse: Tensor | None = None,
) -> Tensor:
    """Attention of one query a sequence over its cached rows.

    Args:
        q: bfloat16 [B, H, 576], queries with W_UK absorbed | rotated; H 8, 16, 32 or 64; over an e4m3 cache below
            2**22, as they become float16 there. Or [B, S, H, 576], S up to 8:
            the last S tokens of each sequence, of which each sees one row more than the one before.
        cache: bfloat16 or e4m3, pages [P, 64, 576] with `block_table`, else [B, T, 576].
        seq_lens: int32 [B], rows of each sequence, clamped to what the cache can hold; 0 gives zeros. Of S tokens the
            last one sees them all, and one that sees none gives zeros.
        softmax_scale: multiplies the scores.
        block_table: int32 [B, max_pages], page of each 64 positions; entries past a sequence's end are not read.
        cache_scale: of an e4m3 cache, whose values are multiplied by it.
        plan: of `mla_plan` over these lengths (`request_lengths` of them for S tokens) and this cache:
            which block takes which rows, so that lengths may differ; None splits every context into the same number
            of parts. With it `block_table` must not be written after the plan's launch.
        rounded: over an e4m3 cache by a plan, queries, of 8 heads weights too, are rounded to e4m3: 3.3 to 3.7 % off
            instead of 0.2 %. The plan should be one for that.
        lse: float32 [B, H], takes the logarithms of the sums of exponentials, -inf of a sequence without rows; of one
            query a sequence.

    Returns:
        bfloat16 [B, H, 512] or [B, S, H, 512], sums of latents.
    """
    if q.dim() == 4:
        return _several(q, cache, seq_lens, softmax_scale, block_table, cache_scale, plan, rounded)
    capacity = mla_cuda.capacity_of(cache, block_table)
    if plan is not None and capacity:
        check_plan(q, plan)
        arguments = q, cache, seq_lens, softmax_scale, block_table
        return _by_plan(*arguments, plan, cache_scale, 1, capacity, rounded, lse)
    choice = _even_choice(q, cache, capacity)
    rows = q.view(-1, mla_cuda.FEW_HEADS, ROW) if choice.eights else q
    out: Tensor = mla_cuda.run(rows, cache, seq_lens, softmax_scale, block_table, choice.splits, cache_scale, lse=lse)
    return out.view(*q.shape[:2], LATENT)


def _even_choice(q: Tensor, cache: Tensor, capacity: int) -> tuning.AttentionChoice:
    """Without a plan: the tuned split, else one for the shapes alone."""
    name, sm_count = hopper(q.device.index, "mla_decode")
    batch, heads = q.shape[:2]
    choice = tuning.choose(batch, heads, capacity, cache.dtype != q.dtype, name, sm_count)
    return choice if choice.splits else tuning.even_choice(batch, heads, capacity, sm_count)


def _by_plan(
    q: Tensor, cache: Tensor, seq_lens: Tensor, softmax_scale: float, block_table: Tensor | None, plan: Tensor,
    cache_scale: float, tokens: int, capacity: int, rounded: bool, lse: Tensor | None = None,
) -> Tensor:  # fmt: skip
    whole = mla_plan.uncut(q.shape[0], capacity, q.shape[1])
    arguments = q, cache, seq_lens, softmax_scale, block_table, plan, cache_scale
    # Short contexts, which no plan cuts, are converted as fast. The largest score is found before it is multiplied.
    fp8 = cache.dtype != q.dtype and (rounded or (softmax_scale * cache_scale > 0 and not whole))
    terms = (1 if rounded else 2) if fp8 else 0
    return mla_cuda.run_planned(*arguments, terms, tokens=tokens, whole=whole, lse=lse)


def _several(
    q: Tensor, cache: Tensor, seq_lens: Tensor, softmax_scale: float, block_table: Tensor | None, cache_scale: float,
    plan: Tensor | None, rounded: bool,
) -> Tensor:  # fmt: skip
    """Several queries a sequence, [B, S, H, 576] to [B, S, H, 512]: one pass over the cache for 64 rows of them."""
    batch, tokens, heads = q.shape[:3]
    fold = folding(tokens, heads)
    if fold.padding:
        q = torch.cat((q.new_zeros(batch, fold.padding, heads, ROW), q), dim=1)
    rows = q.view(batch * fold.requests, fold.rows, ROW)
    lengths = request_lengths(seq_lens, tokens, heads)
    capacity = mla_cuda.capacity_of(cache, block_table)
    arguments = rows, cache, lengths, softmax_scale, block_table
    if plan is not None and capacity:
        check_plan(rows, plan)
        out: Tensor = _by_plan(*arguments, plan, cache_scale, fold.tokens, capacity, rounded)
    else:
        choice = _even_choice(rows, cache, capacity)
        if choice.eights:  # a request of several tokens is not divided
            sm_count = hopper(q.device.index, "mla_decode")[1]
            choice = replace(choice, splits=mla_cuda.choose_splits(len(rows), capacity, sm_count))
        out = mla_cuda.run(*arguments, choice.splits, cache_scale, fold.tokens)
    return out.view(batch, -1, heads, LATENT)[:, fold.padding :].contiguous()
