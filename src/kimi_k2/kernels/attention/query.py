"""The new tokens' queries and cache entries at decode, for a BF16 cache, in one launch.

`torch.ops.kimi_k2.query_and_entry`, of a few tokens with an FP8 or BF16 q_b, begins at attention's first GEMMs: q_b
behind its norm, RoPE, W_UK absorbed, the entry (csrc/query.cu). `torch.ops.kimi_k2.absorb` begins behind q_b and sums
in one order, for batch-invariant mode (csrc/absorb.cu).
"""

from __future__ import annotations

from torch import Tensor

from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.common.structure import structure

Arguments = structure("attention/csrc/query.cu", "QueryArguments")
AbsorbArguments = structure("attention/csrc/absorb.cu", "AbsorbArguments")


# Behind q_b or its input; a new entry lies in a slot numbered through all N * P, one outside writes nothing.
ENTRY = (
    "kv_norm bf16[512], cos bf16[B,32], sin bf16[B,32], slots i64[B], w_uk bf16[H,128,512], cache bf16[N,P,576]"
    " -> out bf16[B,H,576]"
)


@kernel_operation(
    "query_and_entry",
    "qkv_a bf16[B,2112], q_norm bf16[1536], q_b e4m3|bf16[192*H,1536], q_b_scale_inv f32[192*H/128,12]?, "
    f"{ENTRY}; 0 < B <= 16; (q_b.dtype == bf16) == (q_b_scale_inv is None)",
    mutates_args=("cache",),
)
def query_and_entry(
    qkv_a: Tensor,
    q_norm: Tensor,
    q_b: Tensor,
    q_b_scale_inv: Tensor | None,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    w_uk: Tensor,
    cache: Tensor,
    q_eps: float,
    kv_eps: float,
    *,
    out: Tensor,
) -> None:
    """Store the new token's entry and make its query.

    Args:
        qkv_a: q_a before its norm | latent before its norm | key before RoPE.
        cos, sin: at the tokens' positions.
        cache: written.

    Returns:
        W_UK^T q_nope | rotated q_rope; q itself is rounded to bfloat16.
    """
    arguments = Arguments(
        kv_norm=kv_norm, cos=cos, sin=sin, slots=slots, w_uk=w_uk, cache=cache, out=out, qkv_a=qkv_a, q_norm=q_norm,
        q_b=q_b, q_b_scale=q_b_scale_inv,
        tokens=qkv_a.shape[0], heads=w_uk.shape[0], capacity=cache.shape[0] * cache.shape[1],
        kv_stride=qkv_a.shape[1], q_eps=q_eps, kv_eps=kv_eps,
    )  # fmt: skip
    launch("attention/query", "kimi_query", "query_and_entry", qkv_a.device, arguments)


@kernel_operation("absorb", f"q bf16[B,192*H], kv_a bf16[B,576] rows16, {ENTRY}", mutates_args=("cache",))
def absorb(
    q: Tensor, kv_a: Tensor, kv_norm: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, w_uk: Tensor, cache: Tensor,
    eps: float, *, out: Tensor,
) -> None:  # fmt: skip
    """`ops.mla.absorb_and_store` over a BF16 cache; a sequence's bits do not depend on how many there are."""
    arguments = AbsorbArguments(
        kv_norm=kv_norm, cos=cos, sin=sin, slots=slots, w_uk=w_uk, cache=cache, out=out, q=q, kv_a=kv_a,
        tokens=q.shape[0], heads=w_uk.shape[0], capacity=cache.shape[0] * cache.shape[1],
        kv_stride=kv_a.stride(0), kv_eps=eps,
    )  # fmt: skip
    launch("attention/absorb", "kimi_absorb", "absorb", q.device, arguments)
