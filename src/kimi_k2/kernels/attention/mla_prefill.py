"""MLA prefill attention: `torch.ops.kimi_k2.mla_prefill` and `mla_prefill_ragged`, for `ops.mla`'s two functions.

Keys (128 of a head, 64 rotated ones shared by all heads) and values (128) are expanded from the cached latents by one
GEMM; then attention runs over blocks of slots with an online softmax, never writing the scores (csrc/prefill.cu).
Queries at position p see slots 0..p, so a chunk of a prompt attends to what earlier chunks left in the cache.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.hardware import hopper, runs_cuda
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.common.structure import structure
from kimi_k2.kernels.common.workspace import HEADER_WORDS, control
from kimi_k2.kernels.linear import dense_gemm
from kimi_k2.ops.mla import Ragged
from kimi_k2.ops.registry import batch_invariant

NOPE, ROPE, VALUE, RANK = 128, 64, 128, 512
LOG2_E = 1.4426950408889634
# Queries of a tile and slots of a step; tiles of each head that a launch's table holds.
TILE, MOST_TILES = 128, 192
# Steps of a tile from which on two blocks may share it where not all such pairs run at once: merging takes time.
LONG = 12
Arguments = structure("attention/csrc/prefill.cu", "PrefillArguments")


def supports_mla_naive_attention(
    q_nope: Tensor, q_rope: Tensor, cache: Tensor, kv_b: Tensor, positions: Tensor, softmax_scale: float
) -> bool:
    """BF16 on a Hopper GPU with nvcc, the real head sizes, rows that begin at whole 16 bytes."""
    return (
        kv_b.dtype == torch.bfloat16
        and tuple(kv_b.shape[1:]) == (NOPE + VALUE, RANK)
        and mla_prefill.fits(q_nope=q_nope, q_rope=q_rope, cache=cache)
        and runs_cuda(q_nope.device)
    )


def supports_ragged(
    q_nope: Tensor, q_rope: Tensor, slots: Tensor, kv_b: Tensor, queries: Ragged, keys: Ragged, softmax_scale: float
) -> bool:
    """What is taken of one sequence, whatever the lengths."""
    one = q_nope.unsqueeze(0), q_rope.unsqueeze(0), slots.unsqueeze(0), kv_b, q_nope, softmax_scale
    return bool(q_nope.numel()) and supports_mla_naive_attention(*one)


def expand(cache: Tensor, kv_b: Tensor) -> Tensor:
    """Keys without position | values of all heads, [B, H, T, 256], by cuBLAS, in batch-invariant mode `dense_gemm`."""
    if not batch_invariant():
        return torch.matmul(cache[..., :RANK].unsqueeze(1), kv_b.mT)
    latents = cache[..., :RANK].reshape(-1, RANK)  # of one prompt without a copy
    expanded = dense_gemm.dense_gemm(latents, kv_b.reshape(-1, RANK).contiguous(), 1)
    return expanded.view(*cache.shape[:2], len(kv_b), NOPE + VALUE).transpose(1, 2)


def mla_naive_attention(
    q_nope: Tensor, q_rope: Tensor, cache: Tensor, kv_b: Tensor, positions: Tensor, softmax_scale: float
) -> Tensor:
    """`mla_prefill` with the plain function's arguments.

    In batch-invariant mode no tile's slots are shared out: the kernel passes over them from the first one on, and slots
    that a query does not see add exact zeros.
    """
    return mla_prefill(
        q_nope, q_rope, expand(cache, kv_b), cache, positions, softmax_scale, ranks=int(batch_invariant())
    )


def mla_ragged_attention(
    q_nope: Tensor, q_rope: Tensor, slots: Tensor, kv_b: Tensor, queries: Ragged, keys: Ragged, softmax_scale: float
) -> Tensor:
    """`mla_prefill_ragged` with the plain function's arguments; in batch-invariant mode as `mla_naive_attention`."""
    lengths = list(queries.lengths), list(keys.lengths)
    expanded = expand(slots.unsqueeze(0), kv_b)[0]
    return mla_prefill_ragged(q_nope, q_rope, expanded, slots, *lengths, softmax_scale, ranks=int(batch_invariant()))


def ranks_of(tiles: int, longest: int, mean: float, sm_count: int) -> int:
    """Blocks that share a tile's slots: two of few tiles, or where the longest would end long after the rest.

    Args:
        tiles: of all heads and sequences.
        longest, mean: steps of the longest tile, and of all on average.
        sm_count: of the device.
    """
    even = tiles * mean / sm_count
    return 2 if tiles * 2 <= sm_count or longest >= max(LONG, even * 3 / 2) else 1


@kernel_operation(
    "mla_prefill",
    "q_nope bf16[B,S,H,128] rows16, q_rope bf16[B,S,H,64] rows16, expanded bf16[B,H,T,256] rows16,"
    " cache bf16[B,T,576] rows16, positions i64[B,S] rows -> out bf16[B,S,H,128]; T > 0; ranks in (0, 1, 2)",
)
def mla_prefill(
    q_nope: Tensor,
    q_rope: Tensor,
    expanded: Tensor,
    cache: Tensor,
    positions: Tensor,
    softmax_scale: float,
    ranks: int = 0,
    *,
    out: Tensor,
) -> None:
    """Causal attention of new tokens over cached slots, keys and values expanded.

    Args:
        q_rope: rotated.
        expanded: the part of the keys without position | values.
        cache: of which the last 64 are the rotated keys.
        positions: slots 0..p are seen, all of them from p = T - 1 on; padding (negative) sees slot 0.
        softmax_scale: multiplies the scores; positive.
        ranks: blocks that share a tile's slots; 0 for as many as use the GPU best.
    """
    positions = positions.contiguous()
    tiles, longest = -(-q_nope.shape[1] // TILE), -(-cache.shape[1] // TILE)
    steps = longest, longest - (tiles - 1) / 2
    _launch(q_nope, q_rope, expanded, cache, out, softmax_scale, ranks, tiles, *steps, positions=positions)


def _check_lengths(new: list[int], lengths: list[int], T: int | None, S: int | None) -> None:
    """Each sequence has slots for its queries, and all together have the rows."""
    for name, rows, count in (("new", new, T), ("lengths", lengths, S)):
        if count is not None and sum(rows) != count:
            raise KernelError(f"{name} of {sum(rows)} rows in all, expected {count}")
    if len(new) != len(lengths) or any(not 0 <= some <= all for some, all in zip(new, lengths, strict=False)):
        raise KernelError(f"new {new} and lengths {lengths}: expected as many, each with slots for its queries")


@kernel_operation(
    "mla_prefill_ragged",
    "q_nope bf16[T,H,128] rows16, q_rope bf16[T,H,64] rows16, expanded bf16[H,S,256] rows16, cache bf16[S,576] rows16"
    " -> out bf16[T,H,128]; ranks in (0, 1, 2)",
    also=_check_lengths,
)
def mla_prefill_ragged(
    q_nope: Tensor,
    q_rope: Tensor,
    expanded: Tensor,
    cache: Tensor,
    new: list[int],
    lengths: list[int],
    softmax_scale: float,
    ranks: int = 0,
    *,
    out: Tensor,
) -> None:
    """`mla_prefill` of sequences one after the other, whose queries are the last of their slots.

    Args:
        new, lengths: queries and slots of each.
    """
    nope, rope, expanded, cache, out = (tensor.unsqueeze(0) for tensor in (q_nope, q_rope, expanded, cache, out))
    for table, tiles, longest, mean in _tables(tuple(new), tuple(lengths)):
        _launch(nope, rope, expanded, cache, out, softmax_scale, ranks, tiles, longest, mean, table=table)


@functools.lru_cache(maxsize=64)
def _tables(new: tuple[int, ...], lengths: tuple[int, ...]) -> list[tuple[Any, int, int, float]]:
    """Of each launch the kernel's table, its tiles, and steps of the longest one and on average."""
    tiles, first, slot = [], 0, 0
    for queries, slots in zip(new, lengths, strict=True):
        tiles += [(first + at, min(TILE, queries - at), slot, slots - queries + at) for at in range(0, queries, TILE)]
        first, slot = first + queries, slot + slots
    tiles.sort(key=lambda tile: -tile[3] - tile[1])
    made, kind = [], type(Arguments().table)
    for begin in range(0, len(tiles), MOST_TILES):
        some = tiles[begin : begin + MOST_TILES]
        steps = [-(-(position + count) // TILE) for _, count, _, position in some]
        numbers = [number for tile in some for number in tile]
        made.append((kind(*numbers), len(some), steps[0], sum(steps) / len(some)))
    return made


def _launch(
    nope: Tensor, rope: Tensor, expanded: Tensor, cache: Tensor, out: Tensor, softmax_scale: float, ranks: int,
    tiles: int, longest: int, mean: float, **others: Any,
) -> None:  # fmt: skip
    """Sequences side by side; `tiles` of each head, and their steps."""
    (batch, queries, heads), device = nope.shape[:3], nope.device
    sm_count = hopper(device.index, "mla_prefill")[1]
    arguments = Arguments(
        nope=nope, rope=rope, expanded=expanded, cache=cache, out=out, claimed=control(1, 0, device)[HEADER_WORDS:],
        nope_strides=_strides(nope, 1, 2), rope_strides=_strides(rope, 1, 2),
        expanded_strides=_strides(expanded, 2, 1), cache_strides=_strides(cache, 1, 1),
        batch=batch, queries=queries, heads=heads, slots=cache.shape[1], tiles=tiles,
        ranks=ranks or ranks_of(tiles * heads * batch, longest, mean, sm_count), sm_count=sm_count,
        scale=softmax_scale * LOG2_E, **others,
    )  # fmt: skip
    launch("attention/prefill", "kimi_prefill", "mla_prefill", device, arguments)


def _strides(tensor: Tensor, *dims: int) -> tuple[int, ...]:
    """Of rows, heads and sequences, whose dimension is the first; any that a tensor map takes where there is one."""
    stride, shape = tensor.stride(), tensor.shape
    return tuple([stride[dim] if shape[dim] > 1 else 8 for dim in (*dims, 0)])
