"""The new tokens' cache entries and queries at decode in one order of sums: `torch.ops.kimi_k2.absorb`.

For batch-invariant mode over a BF16 cache; csrc/absorb.cu says how the launch works.
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

NOPE, ROPE, RANK = 128, 64, 512
Arguments = structure("attention/csrc/absorb.cu", "AbsorbArguments")


def supports(q: Tensor, kv_a: Tensor, w_uk: Tensor, cache: Tensor) -> bool:
    """BF16 on a Hopper GPU with nvcc, a BF16 cache in one piece, the real head sizes."""
    return (
        q.dtype == kv_a.dtype == w_uk.dtype == cache.dtype == torch.bfloat16
        and tuple(w_uk.shape[1:]) == (NOPE, RANK)
        and cache.shape[-1] == RANK + ROPE
        and cache.is_contiguous()
        and kv_a.stride(1) == 1
        and kv_a.stride(0) % 8 == 0
        and kv_a.storage_offset() % 8 == 0
        and is_hopper(q.device)
        and find_nvcc() is not None
    )


def _check(
    q: Tensor,
    kv_a: Tensor,
    norm_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    w_uk: Tensor,
    cache: Tensor,
) -> Tensor:
    """The empty result, if the arguments are what the kernel takes."""
    tokens, heads, bf16 = q.shape[0], w_uk.shape[0], torch.bfloat16
    for name, tensor, shape, dtype in (
        ("q", q, (tokens, heads * (NOPE + ROPE)), bf16),
        ("norm_weight", norm_weight, (RANK,), bf16),
        ("cos", cos, (tokens, ROPE // 2), bf16),
        ("sin", sin, (tokens, ROPE // 2), bf16),
        ("slots", slots, (tokens,), torch.int64),
        ("w_uk", w_uk, (heads, NOPE, RANK), bf16),
        ("cache", cache, (*cache.shape[:2], RANK + ROPE), bf16),
    ):
        expect(name, tensor, q.device, shape, dtype)
    if tuple(kv_a.shape) != (tokens, RANK + ROPE) or kv_a.dtype != bf16 or kv_a.stride(1) != 1 or kv_a.stride(0) % 8:
        raise KernelError(f"kv_a is {kv_a.dtype} {list(kv_a.shape)}, expected bfloat16 {[tokens, RANK + ROPE]}")
    return q.new_empty(tokens, heads, RANK + ROPE)


@kernel_operation("absorb", mutates_args=("cache",))
def absorb(
    q: Tensor,
    kv_a: Tensor,
    norm_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    w_uk: Tensor,
    cache: Tensor,
    eps: float,
) -> Tensor:
    """`absorb_and_store` over a BF16 cache, its arguments; a sequence's bits do not depend on how many there are.

    Raises:
        KernelError: a shape or dtype that the kernel does not take, or a failed launch.
    """
    out = _check(q, kv_a, norm_weight, cos, sin, slots, w_uk, cache)
    if not q.shape[0]:
        return out
    arguments = Arguments(
        kv_norm=norm_weight, cos=cos, sin=sin, slots=slots, w_uk=w_uk, cache=cache, out=out, q=q, kv_a=kv_a,
        tokens=q.shape[0], heads=w_uk.shape[0], capacity=cache.shape[0] * cache.shape[1],
        kv_stride=kv_a.stride(0), kv_eps=eps,
    )  # fmt: skip
    launch("attention/absorb", "kimi_absorb", "absorb", q.device, arguments)
    return out


absorb.fake(_check)
