"""The new tokens' queries and cache entries at decode, for a BF16 cache, in one launch.

`torch.ops.kimi_k2.query_and_entry`, of a few tokens with an FP8 or BF16 q_b, begins at attention's first GEMMs: q_b
behind its norm, RoPE, W_UK absorbed, the entry (csrc/query.cu). `torch.ops.kimi_k2.absorb` begins behind q_b and sums
in one order, for batch-invariant mode (csrc/absorb.cu).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.build import find_nvcc
from kimi_k2.kernels.common.hardware import is_hopper
from kimi_k2.kernels.common.launch import expect, launch
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.common.structure import structure

INPUT, NOPE, ROPE, RANK = 1536, 128, 64, 512
MAX_TOKENS = 4
# Of a BF16 q_b, which each token's blocks read anew, more are faster one launch after the other.
MAX_BF16_TOKENS = 2
Arguments = structure("attention/csrc/query.cu", "QueryArguments")
AbsorbArguments = structure("attention/csrc/absorb.cu", "AbsorbArguments")


def _takes(x: Tensor, w_uk: Tensor, cache: Tensor) -> bool:
    """What both want: BF16 on a Hopper GPU with nvcc, the real head sizes, a BF16 cache in one piece."""
    return (
        x.dtype == w_uk.dtype == cache.dtype == torch.bfloat16
        and tuple(w_uk.shape[1:]) == (NOPE, RANK)
        and cache.shape[-1] == RANK + ROPE
        and cache.is_contiguous()
        and is_hopper(x.device)
        and find_nvcc() is not None
    )


def supports(qkv_a: Tensor, q_b: Tensor, w_uk: Tensor, cache: Tensor) -> bool:
    """A few BF16 tokens on a Hopper GPU, an e4m3 or BF16 q_b and the real sizes, a BF16 cache in one piece."""
    return (
        q_b.dtype in (torch.float8_e4m3fn, torch.bfloat16)
        and 0 < qkv_a.shape[0] <= (MAX_BF16_TOKENS if q_b.dtype == torch.bfloat16 else MAX_TOKENS)
        and qkv_a.shape[1] == INPUT + RANK + ROPE
        and tuple(q_b.shape) == (w_uk.shape[0] * (NOPE + ROPE), INPUT)
        and _takes(qkv_a, w_uk, cache)
    )


def supports_absorb(q: Tensor, kv_a: Tensor, w_uk: Tensor, cache: Tensor) -> bool:
    """BF16 on a Hopper GPU with nvcc, a BF16 cache in one piece, the real head sizes."""
    aligned = kv_a.stride(1) == 1 and kv_a.stride(0) % 8 == 0 and kv_a.storage_offset() % 8 == 0
    return q.dtype == kv_a.dtype and aligned and _takes(q, w_uk, cache)


def _check(x: Tensor, kv_norm: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, w_uk: Tensor, cache: Tensor) -> Tensor:
    """The empty result for the tokens x, if the arguments of both are what the kernels take."""
    (tokens, heads), bf16 = (len(x), len(w_uk)), torch.bfloat16
    for name, tensor, shape, dtype in (
        ("kv_norm", kv_norm, (RANK,), bf16),
        ("cos", cos, (tokens, ROPE // 2), bf16),
        ("sin", sin, (tokens, ROPE // 2), bf16),
        ("slots", slots, (tokens,), torch.int64),
        ("w_uk", w_uk, (heads, NOPE, RANK), bf16),
        ("cache", cache, (*cache.shape[:2], RANK + ROPE), bf16),
    ):
        expect(name, tensor, x.device, shape, dtype)
    return x.new_empty(tokens, heads, RANK + ROPE)


def _check_query(
    qkv_a: Tensor, q_norm: Tensor, q_b: Tensor, q_b_scale_inv: Tensor | None, kv_norm: Tensor, cos: Tensor,
    sin: Tensor, slots: Tensor, w_uk: Tensor, cache: Tensor,
) -> Tensor:  # fmt: skip
    rows, device = len(w_uk) * (NOPE + ROPE), qkv_a.device
    if q_b_scale_inv is not None:
        expect("q_b_scale_inv", q_b_scale_inv, device, (-(-rows // 128), INPUT // 128), torch.float32)
    expect("qkv_a", qkv_a, device, (len(qkv_a), INPUT + RANK + ROPE), torch.bfloat16)
    expect("q_norm", q_norm, device, (INPUT,), torch.bfloat16)
    expect("q_b", q_b, device, (rows, INPUT), torch.bfloat16 if q_b_scale_inv is None else torch.float8_e4m3fn)
    out = _check(qkv_a, kv_norm, cos, sin, slots, w_uk, cache)
    if not 0 < len(qkv_a) <= MAX_TOKENS:
        raise KernelError(f"{len(qkv_a)} tokens: expected 1 to {MAX_TOKENS}")
    return out


@kernel_operation("query_and_entry", mutates_args=("cache",))
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
) -> Tensor:
    """Store the new token's entry and make its query.

    Args:
        qkv_a: bfloat16 [B, 1536 + 576], B up to 4: q_a before its norm | latent before its norm | key before RoPE.
        q_norm: bfloat16 [1536].
        q_b: e4m3 [H * 192, 1536], in 128x128 blocks, or bfloat16.
        q_b_scale_inv: float32 [ceil(H * 192 / 128), 12]; None with a bfloat16 q_b.
        kv_norm: bfloat16 [512].
        cos, sin: bfloat16 [B, 32] at the tokens' positions.
        slots: int64 [B], to write, numbered through all N * P; one outside the cache writes nothing.
        w_uk: bfloat16 [H, 128, 512].
        cache: bfloat16 [N, P, 576], written.

    Returns:
        bfloat16 [B, H, 576], W_UK^T q_nope | rotated q_rope; q itself is rounded to bfloat16.
    """
    out = _check_query(qkv_a, q_norm, q_b, q_b_scale_inv, kv_norm, cos, sin, slots, w_uk, cache)
    arguments = Arguments(
        kv_norm=kv_norm, cos=cos, sin=sin, slots=slots, w_uk=w_uk, cache=cache, out=out, qkv_a=qkv_a, q_norm=q_norm,
        q_b=q_b, q_b_scale=q_b_scale_inv,
        tokens=qkv_a.shape[0], heads=w_uk.shape[0], capacity=cache.shape[0] * cache.shape[1],
        kv_stride=qkv_a.shape[1], q_eps=q_eps, kv_eps=kv_eps,
    )  # fmt: skip
    launch("attention/query", "kimi_query", "query_and_entry", qkv_a.device, arguments)
    return out


query_and_entry.fake(_check_query)


def _check_absorb(
    q: Tensor, kv_a: Tensor, kv_norm: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, w_uk: Tensor, cache: Tensor
) -> Tensor:
    expect("q", q, q.device, (len(q), len(w_uk) * (NOPE + ROPE)), torch.bfloat16)
    wanted = [len(q), RANK + ROPE]
    if list(kv_a.shape) != wanted or kv_a.dtype != q.dtype or kv_a.stride(1) != 1 or kv_a.stride(0) % 8:
        raise KernelError(f"kv_a is {kv_a.dtype} {list(kv_a.shape)}, expected bfloat16 {wanted}")
    return _check(q, kv_norm, cos, sin, slots, w_uk, cache)


@kernel_operation("absorb", mutates_args=("cache",))
def absorb(
    q: Tensor, kv_a: Tensor, kv_norm: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, w_uk: Tensor, cache: Tensor,
    eps: float,
) -> Tensor:  # fmt: skip
    """`ops.mla.absorb_and_store` over a BF16 cache; a sequence's bits do not depend on how many there are."""
    out = _check_absorb(q, kv_a, kv_norm, cos, sin, slots, w_uk, cache)
    if not q.shape[0]:
        return out
    arguments = AbsorbArguments(
        kv_norm=kv_norm, cos=cos, sin=sin, slots=slots, w_uk=w_uk, cache=cache, out=out, q=q, kv_a=kv_a,
        tokens=q.shape[0], heads=w_uk.shape[0], capacity=cache.shape[0] * cache.shape[1],
        kv_stride=kv_a.stride(0), kv_eps=eps,
    )  # fmt: skip
    launch("attention/absorb", "kimi_absorb", "absorb", q.device, arguments)
    return out


absorb.fake(_check_absorb)
