"""MLA decode attention over an e4m3 cache by a plan, with queries and weights in e4m3 too: csrc/mla_fp8.cuh.

Queries come to e4m3 head by head, times a power of two that brings the largest value into its upper range. In two terms
they keep bfloat16's bits, and weights as many; in one, results are about 3.7 % off over values of a normal
distribution, as FlashMLA's are.
"""

from __future__ import annotations

from torch import Tensor, float16, float32

from kimi_k2.errors import KernelError
from kimi_k2.kernels.attention.mla_cuda import arguments_of, plan_items
from kimi_k2.kernels.attention.mla_sizes import LATENT
from kimi_k2.kernels.common.launch import launch


def run_planned(
    q: Tensor,
    cache: Tensor,
    seq_lens: Tensor,
    softmax_scale: float,
    block_table: Tensor | None,
    plan: Tensor,
    cache_scale: float = 1.0,
    tokens: int = 1,
    whole: bool = False,
    terms: int = 1,
    lse: Tensor | None = None,
) -> Tensor:
    """`mla_cuda.run_planned` over an e4m3 cache, its arguments, in one term or two.

    Raises:
        KernelError: a scale is not positive, there is no CUDA compiler, or the launch failed.
    """
    if not softmax_scale * cache_scale > 0:
        raise KernelError(f"softmax_scale {softmax_scale}, cache_scale {cache_scale}: expected positive ones")
    batch, heads = q.shape[:2]
    out, parts = q.new_empty(batch, heads, LATENT), None
    if not whole:
        items = plan_items(q, plan)
        parts = q.new_empty(items, heads, LATENT, dtype=float16), q.new_empty(items, heads, 2, dtype=float32)
    given = q, cache, seq_lens, softmax_scale, block_table, cache_scale, 0, out, parts
    arguments = arguments_of(*given, plan, tokens, whole=whole, lse=lse)
    launch("attention/mla_fp8", "kimi_mla_fp8", "mla_decode", q.device, q, arguments, terms)
    return out
