"""Rotation and attention within segments by our own kernel for Hopper: `torch.ops.kimi_k2.packed_attention`.

Heads of 72 values are what other kernels pad to 80, 96 or 128; csrc/attention.cuh says how this one works.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.build import find_nvcc
from kimi_k2.kernels.common.hardware import hopper, is_hopper
from kimi_k2.kernels.common.launch import expect, launch
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.vision.schedule import QUERIES, Schedule, schedule
from kimi_k2.ops.vision import Segments, uploaded

HEAD = 72
# Tokens past the last one that tiles may touch.
PADDING = QUERIES
# Values of csrc/attention.cuh's Sums: a row's 72 and two more, for a tile's queries.
SUMS = QUERIES * (HEAD + 2)


def supports(qkv: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """BF16 heads of 72 values on compute capability 9.0, nvcc, nothing to differentiate."""
    return (
        is_hopper(qkv.device)
        and _fault(qkv, cos, sin) is None
        and not (torch.is_grad_enabled() and qkv.requires_grad)
        and find_nvcc() is not None
    )


def rotated_attention(qkv: Tensor, cos: Tensor, sin: Tensor, segments: Segments, softmax_scale: float) -> Tensor:
    """`ops.vision.rotated_attention` with the plain function's arguments."""
    packed = rotate_and_pack(qkv, cos, sin)
    work = scheduled(segments, qkv.shape[2], qkv.device)
    out: Tensor = packed_attention(packed, work.parts, work.starts, work.joins, work.slots, qkv.shape[0], softmax_scale)
    return out


def scheduled(segments: Segments, heads: int, device: torch.device) -> Schedule:
    """The schedule of a pack on the device, kept with its segments."""
    _, sms = hopper(device.index, "packed_attention")

    def make() -> Schedule:
        work = schedule(segments.tiles(QUERIES), heads, sms)
        parts, starts, joins = (uploaded(part, device) for part in (work.parts, work.starts, work.joins))
        return Schedule(parts, starts, joins, work.slots)

    return segments.derived((schedule, heads, device), make)


def _fault(qkv: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    if qkv.dim() != 4 or qkv.shape[1] != 3 or qkv.shape[3] != HEAD or qkv.dtype != torch.bfloat16:
        return f"qkv is {qkv.dtype} {list(qkv.shape)}, expected bfloat16 [T, 3, H, {HEAD}]"
    if qkv.stride()[1:] != (qkv.shape[2] * HEAD, HEAD, 1) or qkv.stride(0) % 8 or qkv.storage_offset() % 8:
        return f"qkv has strides {qkv.stride()}, expected rows of whole 16 bytes, contiguous within a token"
    for name, tensor in (("cos", cos), ("sin", sin)):
        wanted = (qkv.shape[0], 1, HEAD // 2)
        if tuple(tensor.shape) != wanted or tensor.dtype != torch.float32 or not tensor.is_contiguous():
            return f"{name} is {tensor.dtype} {list(tensor.shape)}, expected contiguous float32 {list(wanted)}"
    return None


def capacity(tokens: int) -> int:
    """Tokens that `rotate_and_pack` makes room for: tiles may end past the last one."""
    return -(-(tokens + PADDING) // 8) * 8


def _packed(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if fault := _fault(qkv, cos, sin):
        raise KernelError(fault)
    shape = 3, qkv.shape[2], HEAD // 8, capacity(qkv.shape[0]), 8
    return torch.empty(shape, dtype=qkv.dtype, device=qkv.device)


@kernel_operation("vision_rotate_and_pack")
def rotate_and_pack(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries and keys rotated, all three in the order that `packed_attention` reads.

    Args:
        qkv: bfloat16 [T, 3, H, 72].
        cos, sin: float32 [T, 1, 36].

    Returns:
        bfloat16 [3, H, 9, `capacity(T)`, 8]: of each head's groups of 8 values all tokens, then zeros.

    Raises:
        KernelError: another shape, dtype or layout, or a failed launch.
    """
    out = _packed(qkv, cos, sin)
    sizes = qkv.shape[0], qkv.shape[2], out.shape[3], qkv.stride(0)
    launch("vision/attention", "kimi_vision_pack", "rotate_and_pack", qkv.device, qkv, cos, sin, out, *sizes)
    return out


rotate_and_pack.fake(_packed)


def _attended(packed: Tensor, parts: Tensor, starts: Tensor, joins: Tensor, tokens: int) -> Tensor:
    if packed.dim() != 5 or packed.shape[0] != 3 or tuple(packed.shape[2:]) != (HEAD // 8, capacity(tokens), 8):
        raise KernelError(f"packed is {list(packed.shape)}, expected [3, H, {HEAD // 8}, {capacity(tokens)}, 8]")
    expect("packed", packed, packed.device, tuple(packed.shape), torch.bfloat16)
    expect("parts", parts, packed.device, (parts.shape[0], 6), torch.int32)
    expect("starts", starts, packed.device, (starts.shape[0],), torch.int32)
    expect("joins", joins, packed.device, (joins.shape[0], 5), torch.int32)
    return torch.empty(tokens, packed.shape[1], HEAD, dtype=packed.dtype, device=packed.device)


@kernel_operation("vision_packed_attention")
def packed_attention(
    packed: Tensor, parts: Tensor, starts: Tensor, joins: Tensor, slots: int, tokens: int, softmax_scale: float
) -> Tensor:
    """Attention of each tile's queries to its keys.

    Args:
        packed: as `rotate_and_pack` makes it.
        parts, starts, joins, slots: the pack's `Schedule`.
        tokens: T.

    Returns:
        bfloat16 [T, H, 72].

    Raises:
        KernelError: another shape or dtype, or a failed launch.
    """
    out = _attended(packed, parts, starts, joins, tokens)
    if tokens:
        sums = torch.empty(slots, SUMS, dtype=torch.float32, device=packed.device)
        sizes = starts.shape[0] - 1, joins.shape[0], packed.shape[1], packed.shape[3]
        given = packed, parts, starts, joins, sums, out
        launch(
            "vision/attention", "kimi_vision_attention", "packed_attention", packed.device, *given, *sizes,
            float(softmax_scale),
        )  # fmt: skip
    return out


packed_attention.fake(_attended)
