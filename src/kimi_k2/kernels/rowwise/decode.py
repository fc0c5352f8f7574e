"""What lies between attention's GEMMs at decode, one launch each (replaces lines of `model.attention`, `.norm`).

`absorb_and_store`: kv_a norm, RoPE of key and queries, cache write, W_UK absorbed into the queries.
`add_norm`: residual sum and the norm after it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.build import find_nvcc
from kimi_k2.kernels.common.hardware import has_triton, is_hopper
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation

NOPE, ROPE, RANK = 128, 64, 512
CACHE_DTYPES = (torch.bfloat16, torch.float8_e4m3fn)
# Sequences from which on W_UK is a batched GEMM of cuBLAS: the launch reads it anew for each of them, which took 22 us
# for 64 of eight heads.
ABSORB_APART = 17
ABSORB_TOKENS = 16  # of a program that multiplies several tokens together
ABSORB_WIDTH = 32  # columns of such a program
# Sequences that go by such programs, in one launch with the rest; fewer are multiplied one by one.
ABSORB_GROUPS = range(5, 129)


def supports(x: Tensor, w_uk: Tensor, cache: Tensor) -> bool:
    """BF16 on a GPU with Triton, a BF16 or e4m3 cache, and the real head sizes."""
    return (
        x.is_cuda
        and has_triton()
        and x.dtype == w_uk.dtype == torch.bfloat16
        and cache.dtype in CACHE_DTYPES
        and tuple(w_uk.shape[1:]) == (NOPE, RANK)
        and cache.shape[-1] == RANK + ROPE
    )


def supports_sum(x: Tensor) -> bool:
    """Whether `add_norm` takes tokens like x: BF16 on a GPU with Triton."""
    return x.is_cuda and x.dtype == torch.bfloat16 and has_triton()


@functools.cache
def _kernels() -> Any:
    from kimi_k2.kernels.rowwise import decode_triton

    return decode_triton


def _check_absorb(q: Tensor, kv_a: Tensor, w_uk: Tensor, cos: Tensor, slots: Tensor, cache: Tensor) -> None:
    batch, heads = q.shape[0], w_uk.shape[0]
    for name, tensor, shape in (
        ("q", q, (batch, heads * (NOPE + ROPE))),
        ("kv_a", kv_a, (batch, RANK + ROPE)),
        ("w_uk", w_uk, (heads, NOPE, RANK)),
        ("cos", cos, (batch, ROPE // 2)),
        ("slots", slots, (batch,)),
        ("cache", cache, (*cache.shape[:2], RANK + ROPE)),
    ):
        if tuple(tensor.shape) != shape or (name != "kv_a" and not tensor.is_contiguous()):
            raise KernelError(f"{name} is {list(tensor.shape)}, expected {list(shape)}, contiguous")
        dtypes = CACHE_DTYPES if name == "cache" else CACHE_DTYPES[:1]
        if name != "slots" and tensor.dtype not in dtypes:
            raise KernelError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if kv_a.stride(1) != 1:
        raise KernelError("kv_a must be contiguous along its last dimension")


@kernel_operation("absorb_and_store", mutates_args=("cache",))
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
) -> Tensor:
    """Store the new token's entry and make its query.

    Args:
        q: bfloat16 [B, H * 192], unturned.
        kv_a: bfloat16 [B, 576], latent before its norm | key before RoPE; rows may be strided.
        kv_norm: bfloat16 [512].
        cos, sin: bfloat16 [B, 32] at the tokens' positions.
        slots: int64 [B], to write, numbered through all N * P; one outside the cache writes nothing.
        w_uk: bfloat16 [H, 128, 512].
        cache: bfloat16 or e4m3 [N, P, 576], written.
        cache_scale: of an e4m3 cache, whose values are multiplied by it, as `mla_decode` reads them; saturated at 448.
        invariant: a sequence's bits do not depend on how many there are.

    Returns:
        bfloat16 [B, H, 576], W_UK^T q_nope | rotated q_rope.
    """
    _check_absorb(q, kv_a, w_uk, cos, slots, cache)
    batch, heads, capacity = q.shape[0], w_uk.shape[0], cache.shape[0] * cache.shape[1]
    query = torch.empty(batch, heads, RANK + ROPE, dtype=torch.bfloat16, device=q.device)
    stored = 1.0 / cache_scale if cache.dtype == torch.float8_e4m3fn else 1.0
    # Triton's ranges are powers of two.
    if not invariant and batch in ABSORB_GROUPS and heads & (heads - 1) == 0:
        _kernels().absorb_groups[(heads * (RANK // ABSORB_WIDTH) + ABSORB_TOKENS, -(-batch // ABSORB_TOKENS))](
            q, kv_a, kv_norm, cos, sin, slots, w_uk, query, cache, batch, kv_a.stride(0), capacity, eps, stored,
            HEADS=heads, NOPE=NOPE, ROPE=ROPE, RANK=RANK, WIDTH=ABSORB_WIDTH, TOKENS=ABSORB_TOKENS, OVERLAP=True,
            num_warps=4, launch_pdl=True,
        )  # fmt: skip
        return query
    apart = invariant or batch >= ABSORB_APART
    programs, first = heads * (RANK // 64) + heads + 1, heads * (RANK // 64) if apart else 0
    if batch:
        _kernels().absorb[(programs - first, batch)](
            q, kv_a, kv_norm, cos, sin, slots, w_uk, query, cache, kv_a.stride(0), capacity, eps, stored,
            HEADS=heads, NOPE=NOPE, ROPE=ROPE, RANK=RANK, WIDTH=64, OVERLAP=True, FIRST=first,
            num_warps=4, launch_pdl=True,
        )  # fmt: skip
    if first and invariant:
        _kernels().absorb_tokens[(heads * (RANK // 64), -(-batch // ABSORB_TOKENS))](
            q, w_uk, query, batch, HEADS=heads, NOPE=NOPE, ROPE=ROPE, RANK=RANK, WIDTH=64, TOKENS=ABSORB_TOKENS,
            OVERLAP=True, num_warps=4, launch_pdl=True,
        )  # fmt: skip
    elif first:
        nope = q.view(batch, heads, NOPE + ROPE)[..., :NOPE].transpose(0, 1)
        torch.bmm(nope, w_uk, out=query[..., :RANK].transpose(0, 1))
    return query


absorb_and_store.fake(_check_absorb, lambda q, w_uk: q.new_empty((q.shape[0], w_uk.shape[0], RANK + ROPE)))


def check_add(x: Tensor, delta: Tensor, weight: Tensor) -> None:
    """KernelError unless x, delta and weight are contiguous bfloat16 [T, H], [T, H], [H]."""
    if x.shape != delta.shape or x.dim() != 2 or tuple(weight.shape) != (x.shape[1],):
        raise KernelError(f"{list(x.shape)}, {list(delta.shape)}, {list(weight.shape)}: expected [T, H], [T, H], [H]")
    if not x.dtype == delta.dtype == weight.dtype == torch.bfloat16:
        raise KernelError(f"{x.dtype}, {delta.dtype}, {weight.dtype}: expected torch.bfloat16")
    if not (x.is_contiguous() and delta.is_contiguous()):
        raise KernelError("x and delta must be contiguous")


@kernel_operation("add_norm")
def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + delta and its RMSNorm, both bfloat16 [T, H]; the norm is that of the sum before it is rounded.

    Raises:
        KernelError: shapes or dtypes differ from bfloat16 [T, H], [T, H], [H].
    """
    check_add(x, delta, weight)
    total, normed = torch.empty_like(x), torch.empty_like(x)
    if x.shape[0] and is_hopper(x.device) and x.shape[1] % 8 == 0 and x.shape[1] <= 8192 and find_nvcc() is not None:
        tensors = x, delta, weight, total, normed, None
        launch("rowwise/add_norm", "kimi_add_norm", "add_norm", x.device, *tensors, *x.shape, x.shape[1], float(eps))
    elif x.shape[0]:
        width = 1 << (x.shape[1] - 1).bit_length()
        _kernels().add_norm[(x.shape[0],)](x, delta, weight, total, normed, x.shape[1], eps, WIDTH=width, num_warps=16)
    return total, normed


add_norm.fake(check_add, lambda x: (torch.empty_like(x), torch.empty_like(x)))


def _apart(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[0], dtype=torch.float32)


def _check_apart(x: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    check_add(x, delta, weight)
    return torch.empty_like(x), *_apart(x)


@kernel_operation("add_norm_apart")
def add_norm_apart(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`add_norm` without the norm's quotient, for a GEMM that takes its sums times it.

    Returns:
        x + delta and weight * (x + delta), both bfloat16 [T, H], H a multiple of 8 up to 8192, and the quotients,
        float32 [T].

    Raises:
        KernelError: as `add_norm`, or a failed launch.
    """
    made = _check_apart(x, delta, weight)
    if x.shape[0]:
        launch(
            "rowwise/add_norm", "kimi_add_norm", "add_norm_apart", x.device, x, delta, weight, *made, *x.shape,
            x.shape[1], float(eps),
        )  # fmt: skip
    return made


add_norm_apart.fake(_check_apart)


def _check_norm_apart(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    if x.dim() != 2 or x.stride(1) != 1 or x.stride(0) % 8 or tuple(weight.shape) != (x.shape[1],):
        raise KernelError(f"{list(x.shape)}, {list(weight.shape)}: expected [T, H], rows of whole 16 bytes, and [H]")
    if not x.dtype == weight.dtype == torch.bfloat16:
        raise KernelError(f"{x.dtype}, {weight.dtype}: expected torch.bfloat16")
    return _apart(x)


@kernel_operation("norm_apart")
def norm_apart(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_norm_apart` with nothing to add: weight * x and the norm's quotients.

    Args:
        x: bfloat16 [T, H], H a multiple of 8 up to 8192, rows may be strided.
        weight: bfloat16 [H].
    """
    made = _check_norm_apart(x, weight)
    if x.shape[0]:
        tensors = x, None, weight, None, *made
        launch("rowwise/add_norm", "kimi_add_norm", "norm_apart", x.device, *tensors, *x.shape, x.stride(0), float(eps))
    return made


norm_apart.fake(_check_norm_apart)
