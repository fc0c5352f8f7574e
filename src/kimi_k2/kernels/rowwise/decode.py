"""What lies between attention's GEMMs at decode, one launch each (replaces lines of `model.attention`, `.norm`).

`absorb_and_store`: kv_a norm, RoPE of key and queries, cache write, W_UK absorbed into the queries.
`add_norm`: residual sum and the norm after it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.kernels.common.hardware import has_triton
from kimi_k2.kernels.common.launch import launch, triton_kernels
from kimi_k2.kernels.common.operation import kernel_operation

NOPE, ROPE, RANK = 128, 64, 512
# Sequences from which on W_UK is a batched GEMM of cuBLAS: the launch reads it anew for each group of them.
ABSORB_APART = 129
ABSORB_TOKENS = 16  # of a group, multiplied together
ABSORB_WIDTH = 32  # columns of a program


def supports(x: Tensor, w_uk: Tensor, cache: Tensor) -> bool:
    """BF16 on a GPU with Triton, a BF16 or e4m3 cache, and the real head sizes."""
    return x.is_cuda and x.dtype == torch.bfloat16 and has_triton() and absorb_and_store.fits(w_uk=w_uk, cache=cache)


@kernel_operation(
    "absorb_and_store",
    "q bf16[B,192*H], kv_a bf16[B,576] rows, kv_norm bf16[512], cos bf16[B,32], sin bf16[B,32], slots i64[B],"
    " w_uk bf16[H,128,512], cache bf16|e4m3[N,P,576] -> query bf16[B,H,576]; H & (H - 1) == 0",
    mutates_args=("cache",),
)
def absorb_and_store(
    q: Tensor,
    kv_a: Tensor,
    kv_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    w_uk: Tensor,
    cache: Tensor,
    eps: float,
    cache_scale: float = 1.0,
    invariant: bool = False,
    *,
    query: Tensor,
) -> None:
    """Store the new token's entry and make its query.

    Args:
        q: unturned.
        kv_a: latent before its norm | key before RoPE.
        cos, sin: at the tokens' positions.
        slots: to write, numbered through all N * P; one outside the cache writes nothing.
        cache: written.
        cache_scale: of an e4m3 cache, whose values are multiplied by it, as `mla_decode` reads them; saturated at 448.
        invariant: a sequence's bits do not depend on how many there are.

    Returns:
        W_UK^T q_nope | rotated q_rope.
    """
    batch, heads, capacity = q.shape[0], w_uk.shape[0], cache.shape[0] * cache.shape[1]
    stored = 1.0 / cache_scale if cache.dtype == torch.float8_e4m3fn else 1.0
    apart = batch >= ABSORB_APART and not invariant
    jobs = 0 if apart else heads * (RANK // ABSORB_WIDTH)
    triton_kernels("rowwise/decode").absorb[(jobs + ABSORB_TOKENS, -(-batch // ABSORB_TOKENS))](
        q, kv_a, kv_norm, cos, sin, slots, w_uk, query, cache, batch, kv_a.stride(0), capacity, eps, stored,
        HEADS=heads, NOPE=NOPE, ROPE=ROPE, RANK=RANK, WIDTH=ABSORB_WIDTH, TOKENS=ABSORB_TOKENS, OVERLAP=True, JOBS=jobs,
        num_warps=4, launch_pdl=True,
    )  # fmt: skip
    if apart:
        nope = q.view(batch, heads, NOPE + ROPE)[..., :NOPE].transpose(0, 1)
        torch.bmm(nope, w_uk, out=query[..., :RANK].transpose(0, 1))


def _launch(
    operation: str, x: Tensor, delta: Tensor | None, weight: Tensor, made: tuple[Tensor | None, ...], eps: float
) -> None:
    operands = x, delta, weight, *made, *x.shape, x.stride(0), float(eps)
    launch("rowwise/add_norm", "kimi_add_norm", operation, x.device, *operands)


SUMMANDS = "x bf16[T,H], delta bf16[T,H], weight bf16[H]"


WHOLE = "H % 8 == 0; H <= 8192"


@kernel_operation("add_norm", f"{SUMMANDS} -> total bf16[T,H], normed bf16[T,H]; {WHOLE}")
def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, *, total: Tensor, normed: Tensor) -> None:
    """x + delta and its RMSNorm; the norm is that of the sum before it is rounded."""
    _launch("add_norm", x, delta, weight, (total, normed, None), eps)


@kernel_operation("add_norm_apart", f"{SUMMANDS} -> total bf16[T,H], scaled bf16[T,H], inverse f32[T]; {WHOLE}")
def add_norm_apart(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, *, total: Tensor, scaled: Tensor, inverse: Tensor
) -> None:
    """`add_norm` without the norm's quotient, for a GEMM that takes its sums times it.

    Returns:
        x + delta, weight * (x + delta), and the quotients.
    """
    _launch("add_norm_apart", x, delta, weight, (total, scaled, inverse), eps)


@kernel_operation("norm_apart", f"x bf16[T,H] rows16, weight bf16[H] -> scaled bf16[T,H], inverse f32[T]; {WHOLE}")
def norm_apart(x: Tensor, weight: Tensor, eps: float, *, scaled: Tensor, inverse: Tensor) -> None:
    """`add_norm_apart` with nothing to add: weight * x and the norm's quotients."""
    _launch("norm_apart", x, None, weight, (None, scaled, inverse), eps)
