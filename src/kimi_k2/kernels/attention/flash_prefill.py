"""Prefill attention by FlashAttention 3, which vLLM brings: stands for `ops.mla.mla_naive_attention`.

Keys of 192 and values of 128 a head are what it has a kernel for. The GEMMs write both where it reads them, and the
rotated part of the keys follows; queries that were rotated in place are joined already. Its causal mask ends at the
last slot, so only whole chunks are taken; the others go to `mla_prefill`.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.attention.mla_prefill import NOPE, RANK, ROPE, VALUE, supports_mla_naive_attention
from kimi_k2.kernels.common.launch import triton_kernels
from kimi_k2.ops.mla import Ragged

# Below so many queries, or queries times slots, joining the parts costs more than the faster attention saves.
MIN_QUERIES, MIN_PAIRS = 1024, 2048**2
BLOCK = 64
WARPS = 4


@functools.cache
def flash_attention() -> Callable[..., Any] | None:
    """The forward operation of vLLM's FlashAttention 3, or None; vLLM itself is not imported."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for library in sorted(Path(folder, "vllm_flash_attn").glob("_vllm_fa3_C*.so")):
            try:
                torch.ops.load_library(str(library))
            except OSError:  # built for another PyTorch
                continue
            return torch.ops._vllm_fa3_C.fwd.default  # noqa: SLF001
    return None


def supports(
    q_nope: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    kv_b: Tensor,
    positions: Tensor,
    softmax_scale: float,
    whole: bool = False,
) -> bool:
    """A whole chunk of many tokens that `mla_prefill` would take, and FlashAttention 3 is there."""
    return (
        whole
        and MIN_QUERIES <= q_nope.shape[1] <= cache.shape[1]
        and q_nope.shape[1] * cache.shape[1] >= MIN_PAIRS
        and supports_mla_naive_attention(q_nope, q_rope, cache, kv_b, positions, softmax_scale)
        and flash_attention() is not None
    )


def join(left: Tensor, right: Tensor) -> Tensor:
    """[T, H, 128] and [T, H, 64] to [T, H, 192]; a view where they lie side by side already."""
    if left.stride() == right.stride() and left.data_ptr() + NOPE * left.element_size() == right.data_ptr():
        return left.as_strided((*left.shape[:2], NOPE + ROPE), left.stride())
    tokens, heads, _ = left.shape
    out = left.new_empty(tokens, heads, NOPE + ROPE)
    triton_kernels("attention/mla_prefill").join[(-(-tokens // BLOCK), heads)](
        left, right, out, tokens, heads, *left.stride()[:2], *right.stride()[:2], BLOCK=BLOCK, num_warps=WARPS
    )
    return out


def keys_and_values(slots: Tensor, kv_b: Tensor) -> tuple[Tensor, Tensor]:
    """Of every cached slot and head, each written once where attention reads it.

    Args:
        slots: bfloat16 [S, 576], the last 64 rotated keys.
        kv_b: bfloat16 [H, 256, 512], W_UK above W_UV.

    Returns:
        bfloat16 [S, H, 192] and [S, H, 128].
    """
    count, heads = len(slots), len(kv_b)
    keys, values = slots.new_empty(count, heads, NOPE + ROPE), slots.new_empty(count, heads, VALUE)
    latent = slots[:, :RANK].expand(heads, count, RANK)
    for out, weight in zip((keys[..., :NOPE], values), kv_b.mT.split([NOPE, VALUE], dim=2), strict=True):
        torch.bmm(latent, weight, out=out.transpose(0, 1))
    triton_kernels("attention/mla_prefill").spread[(-(-count // BLOCK), heads)](
        slots[:, RANK:], keys, count, heads, slots.stride(0), BLOCK=BLOCK, num_warps=WARPS
    )
    return keys, values


def attend_ragged(
    q: Tensor, keys: Tensor, values: Tensor, queries: Ragged, slots: Ragged, softmax_scale: float
) -> Tensor:
    """Causal attention of sequences one after the other, whose queries are the last of their slots.

    Args:
        q: bfloat16 [T, H, 192].
        keys, values: bfloat16 [S, H, 192] and [S, H, 128].
        queries, slots: of the T and S rows.
        softmax_scale: multiplies the scores.

    Returns:
        bfloat16 [T, H, 128].

    Raises:
        KernelError: FlashAttention 3 is not there, or has other arguments than vLLM 0.24's.
    """
    forward = flash_attention()
    if forward is None:
        raise KernelError("FlashAttention 3 is not installed")
    # vLLM builds the form for sequences one after the other alone.
    keywords = {
        "q": q, "k": keys, "v": values, "cu_seqlens_q": queries.starts, "cu_seqlens_k": slots.starts,
        "max_seqlen_q": max(queries.lengths), "max_seqlen_k": max(slots.lengths), "softmax_scale": softmax_scale,
        "is_causal": True, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0,
        "is_rotary_interleaved": True, "num_splits": 1, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0,
    }  # fmt: skip
    arguments = {argument.name: keywords.get(argument.name) for argument in forward._schema.arguments}  # type: ignore[attr-defined]  # noqa: SLF001
    if missing := sorted(set(keywords) - set(arguments)):
        raise KernelError(f"FlashAttention 3 has no arguments {', '.join(missing)}, expected vLLM 0.24's")
    return forward(**arguments)[0]


def mla_naive_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    kv_b: Tensor,
    positions: Tensor,
    softmax_scale: float,
    whole: bool = False,
) -> Tensor:
    """The plain function's work, of a whole chunk."""
    batch, device = len(cache), cache.device

    def evenly(length: int) -> Ragged:
        starts = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=device)
        return Ragged((length,) * batch, starts)

    nope, rope, slots = (tensor.flatten(0, 1) for tensor in (q_nope, q_rope, cache))
    queries, keys = evenly(q_nope.shape[1]), evenly(cache.shape[1])
    return mla_ragged_attention(nope, rope, slots, kv_b, queries, keys, softmax_scale).unflatten(0, (batch, -1))


def supports_ragged(
    q_nope: Tensor, q_rope: Tensor, slots: Tensor, kv_b: Tensor, queries: Ragged, keys: Ragged, softmax_scale: float
) -> bool:
    """What `mla_prefill` would take of one sequence, and FlashAttention 3 is there."""
    one = q_nope.unsqueeze(0), q_rope.unsqueeze(0), slots.unsqueeze(0), kv_b, q_nope, softmax_scale
    return bool(q_nope.numel()) and supports_mla_naive_attention(*one) and flash_attention() is not None


def mla_ragged_attention(
    q_nope: Tensor, q_rope: Tensor, slots: Tensor, kv_b: Tensor, queries: Ragged, keys: Ragged, softmax_scale: float
) -> Tensor:
    """The plain function's work in as many launches as one sequence takes."""
    return attend_ragged(join(q_nope, q_rope), *keys_and_values(slots, kv_b), queries, keys, softmax_scale)
