"""From attention's first GEMMs to its query at decode, in one launch: `torch.ops.kimi_k2.query_and_entry`.

q_b behind its norm, RoPE, W_UK absorbed, the new token's cache entry: replaces lines of `model.attention` for a few
tokens with an FP8 or BF16 q_b over a BF16 cache. csrc/query.cu says how the launch works.
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


def supports(qkv_a: Tensor, q_b: Tensor, w_uk: Tensor, cache: Tensor) -> bool:
    """A few BF16 tokens on a Hopper GPU, an e4m3 or BF16 q_b and the real sizes, a BF16 cache in one piece."""
    return (
        qkv_a.dtype == w_uk.dtype == cache.dtype == torch.bfloat16
        and q_b.dtype in (torch.float8_e4m3fn, torch.bfloat16)
        and 0 < qkv_a.shape[0] <= (MAX_BF16_TOKENS if q_b.dtype == torch.bfloat16 else MAX_TOKENS)
        and qkv_a.shape[1] == INPUT + RANK + ROPE
        and tuple(q_b.shape) == (w_uk.shape[0] * (NOPE + ROPE), INPUT)
        and tuple(w_uk.shape[1:]) == (NOPE, RANK)
        and cache.is_contiguous()
        and is_hopper(qkv_a.device)
        and find_nvcc() is not None
    )


def _check(
    qkv_a: Tensor, q_norm: Tensor, q_b: Tensor, q_b_scale_inv: Tensor | None, kv_norm: Tensor, cos: Tensor,
    sin: Tensor, slots: Tensor, w_uk: Tensor, cache: Tensor,
) -> Tensor:  # fmt: skip
    """The empty result, if the arguments are what the kernel takes."""
    tokens, heads = qkv_a.shape[0], w_uk.shape[0]
    rows, bf16 = heads * (NOPE + ROPE), torch.bfloat16
    if q_b_scale_inv is not None:
        expect("q_b_scale_inv", q_b_scale_inv, qkv_a.device, (-(-rows // 128), INPUT // 128), torch.float32)
    for name, tensor, shape, dtype in (
        ("qkv_a", qkv_a, (tokens, INPUT + RANK + ROPE), bf16),
        ("q_norm", q_norm, (INPUT,), bf16),
        ("q_b", q_b, (rows, INPUT), bf16 if q_b_scale_inv is None else torch.float8_e4m3fn),
        ("kv_norm", kv_norm, (RANK,), bf16),
        ("cos", cos, (tokens, ROPE // 2), bf16),
        ("sin", sin, (tokens, ROPE // 2), bf16),
        ("slots", slots, (tokens,), torch.int64),
        ("w_uk", w_uk, (heads, NOPE, RANK), bf16),
        ("cache", cache, (*cache.shape[:2], RANK + ROPE), bf16),
    ):
        expect(name, tensor, qkv_a.device, shape, dtype)
    if not 0 < tokens <= MAX_TOKENS:
        raise KernelError(f"{tokens} tokens: expected 1 to {MAX_TOKENS}")
    return qkv_a.new_empty(tokens, heads, RANK + ROPE)


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

    Raises:
        KernelError: a shape or dtype that the kernel does not take, or a failed launch.
    """
    out = _check(qkv_a, q_norm, q_b, q_b_scale_inv, kv_norm, cos, sin, slots, w_uk, cache)
    arguments = Arguments(
        kv_norm=kv_norm, cos=cos, sin=sin, slots=slots, w_uk=w_uk, cache=cache, out=out, qkv_a=qkv_a, q_norm=q_norm,
        q_b=q_b, q_b_scale=q_b_scale_inv,
        tokens=qkv_a.shape[0], heads=w_uk.shape[0], capacity=cache.shape[0] * cache.shape[1],
        kv_stride=qkv_a.shape[1], q_eps=q_eps, kv_eps=kv_eps,
    )  # fmt: skip
    launch("attention/query", "kimi_query", "query_and_entry", qkv_a.device, arguments)
    return out


query_and_entry.fake(_check)
