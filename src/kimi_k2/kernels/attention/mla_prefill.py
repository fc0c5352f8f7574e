"""MLA prefill attention: `torch.ops.kimi_k2.mla_prefill`, stands for `ops.mla.mla_naive_attention`.

Keys (128 of a head, 64 rotated ones shared by all heads) and values (128) are expanded from the cached latents by one
GEMM; then attention runs over blocks of slots with an online softmax, never writing the scores. Queries at
position p see slots 0..p, so a chunk of a prompt attends to what earlier chunks left in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.kernels.common.hardware import has_triton, is_hopper
from kimi_k2.kernels.common.launch import triton_kernels
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.linear import dense_gemm
from kimi_k2.ops.registry import batch_invariant

NOPE, ROPE, VALUE, RANK = 128, 64, 128, 512
LOG2_E = 1.4426950408889634
# Queries and slots of a step, warps, stages.
LAUNCH = (128, 64, 8, 3)


def supports_mla_naive_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    kv_b: Tensor,
    positions: Tensor,
    softmax_scale: float,
    whole: bool = False,
) -> bool:
    """BF16 on a Hopper GPU, whose shared memory the launch needs, with Triton; the real head sizes."""
    return (
        is_hopper(q_nope.device)
        and has_triton()
        and q_nope.dtype == q_rope.dtype == cache.dtype == kv_b.dtype == torch.bfloat16
        and (q_nope.shape[-1], q_rope.shape[-1]) == (NOPE, ROPE)
        and tuple(kv_b.shape[1:]) == (NOPE + VALUE, RANK)
        and cache.shape[-1] == RANK + ROPE
        and cache.stride(-1) == 1
    )


def mla_naive_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    kv_b: Tensor,
    positions: Tensor,
    softmax_scale: float,
    whole: bool = False,
) -> Tensor:
    """`mla_prefill` with the plain function's arguments, keys and values by cuBLAS.

    In batch-invariant mode they come of `dense_gemm`. The kernel passes over the slots from the first one on, and slots
    that a query does not see add exact zeros; but blocks with such slots are computed by other code than those without:
    without fused multiply-adds both round alike.
    """
    if not batch_invariant():
        expanded = torch.matmul(cache[..., :RANK].unsqueeze(1), kv_b.mT)
        return mla_prefill(q_nope, q_rope, expanded, cache, positions, softmax_scale)
    (batch, slots), heads = cache.shape[:2], len(kv_b)
    latents = cache[..., :RANK].reshape(-1, RANK)  # of one prompt without a copy
    expanded = dense_gemm.dense_gemm(latents, kv_b.reshape(-1, RANK).contiguous(), 1)
    expanded = expanded.view(batch, slots, heads, -1).transpose(1, 2)
    if slots * expanded.stride(2) >= 2**31:  # the kernel reckons offsets of slots in 32 bits
        expanded = expanded.contiguous()
    return run(q_nope, q_rope, expanded, cache, positions, softmax_scale, enable_fp_fusion=False)


# Within a head, the kernel reckons offsets of slots in 32 bits.
@kernel_operation(
    "mla_prefill",
    "q_nope bf16[B,S,H,128] rows, q_rope bf16[B,S,H,64] rows, expanded bf16[B,H,T,256], cache bf16[B,T,576] rows,"
    " positions i64[B,S] rows -> out bf16[B,S,H,128]; T < 2**31 // max(256, cache.stride(1))",
)
def mla_prefill(
    q_nope: Tensor,
    q_rope: Tensor,
    expanded: Tensor,
    cache: Tensor,
    positions: Tensor,
    softmax_scale: float,
    *,
    out: Tensor,
) -> Tensor:
    """Causal attention of new tokens over cached slots, keys and values expanded.

    Args:
        q_rope: rotated.
        expanded: the part of the keys without position | values.
        cache: of which the last 64 are the rotated keys.
        positions: slots 0..p are seen, all of them from p = T - 1 on; padding (negative) sees slot 0.
        softmax_scale: multiplies the scores.
    """
    return run(q_nope, q_rope, expanded, cache, positions, softmax_scale)


def run(
    q_nope: Tensor,
    q_rope: Tensor,
    expanded: Tensor,
    cache: Tensor,
    positions: Tensor,
    softmax_scale: float,
    **options: bool,
) -> Tensor:
    """`mla_prefill` with options of Triton's compiler, arguments unchecked.

    `expanded` may also be a transposed tensor [B, T, H, 256].
    """
    (batch, queries, heads), (block_m, block_n, warps, stages) = q_nope.shape[:3], LAUNCH
    out = q_nope.new_empty(batch, queries, heads, VALUE)
    key_row = NOPE + VALUE if expanded.is_contiguous() else expanded.stride(2)
    if out.numel():
        triton_kernels("attention/mla_prefill").attend[(-(-queries // block_m), heads, batch)](
            q_nope, q_rope, expanded, cache, positions.contiguous(), out, queries, cache.shape[1],
            softmax_scale * LOG2_E, *q_nope.stride()[:3], *q_rope.stride()[:3], *cache.stride()[:2], heads,
            BLOCK_M=block_m, BLOCK_N=block_n, STAGES=stages, KEY_ROW=key_row, num_warps=warps, **options,
        )  # fmt: skip
    return out
