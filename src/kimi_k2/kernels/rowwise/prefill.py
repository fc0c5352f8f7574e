"""What lies between the GEMMs at prefill, one launch each, where plain PyTorch takes five to ten.

FP8 blocks to BF16, RMSNorm, RoPE, the cache's new entries and a rank's rows of the embedding: entries of the dispatch
table for their plain functions.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.hardware import capability, has_triton
from kimi_k2.kernels.common.operation import kernel_operation

BLOCK = 128
MAX_WIDTH = 8192
E4M3_TOP = 448.0
_TILE_ROWS = 32


@functools.cache
def _kernels() -> Any:
    from kimi_k2.kernels.rowwise import prefill_triton

    return prefill_triton


def _runs(*tensors: Tensor) -> bool:
    """BF16 on a GPU that Triton serves, and nothing to differentiate."""
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    on_gpu = all(t.is_cuda and t.dtype == torch.bfloat16 for t in tensors)
    return on_gpu and not differentiated and has_triton() and capability(tensors[0].device.index) >= (8, 0)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def supports_dequantize_fp8_block(
    weight: Tensor,
    weight_scale_inv: Tensor,
    block_size: tuple[int, int] = (BLOCK, BLOCK),
    dtype: torch.dtype = torch.float32,
) -> bool:
    """A matrix in blocks of 128x128, to bfloat16, on a GPU of compute capability 8.9 or later."""
    grid = -(-weight.shape[-2] // BLOCK), -(-weight.shape[-1] // BLOCK)
    return (
        weight.is_cuda
        and weight.dtype == torch.float8_e4m3fn
        and weight.dim() == 2
        and weight.is_contiguous()
        and tuple(block_size) == (BLOCK, BLOCK)
        and dtype == torch.bfloat16
        and weight_scale_inv.dtype == torch.float32
        and tuple(weight_scale_inv.shape) == grid
        and weight_scale_inv.is_contiguous()
        and has_triton()
        and capability(weight.device.index) >= (8, 9)
    )


def dequantize_fp8_block(
    weight: Tensor,
    weight_scale_inv: Tensor,
    block_size: tuple[int, int] = (BLOCK, BLOCK),
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`fp8_block_to_bf16` with the plain function's arguments."""
    out: Tensor = fp8_block_to_bf16(weight, weight_scale_inv)
    return out


def _check_blocks(weight: Tensor, weight_scale_inv: Tensor) -> None:
    grid = [-(-size // BLOCK) for size in weight.shape]
    if weight.dim() != 2 or weight.dtype != torch.float8_e4m3fn or not weight.is_contiguous():
        raise KernelError(f"weight is {weight.dtype} {list(weight.shape)}, expected a contiguous e4m3 matrix")
    scale = weight_scale_inv
    if list(scale.shape) != grid or scale.dtype != torch.float32 or not scale.is_contiguous():
        raise KernelError(f"weight_scale_inv is {scale.dtype} {list(scale.shape)}, expected contiguous float32 {grid}")


@kernel_operation("fp8_block_to_bf16")
def fp8_block_to_bf16(weight: Tensor, weight_scale_inv: Tensor) -> Tensor:
    """Every block times its scale, formed in float32 and rounded once: the plain function's bits.

    Args:
        weight: float8_e4m3fn [N, K].
        weight_scale_inv: float32 [ceil(N / 128), ceil(K / 128)], contiguous.

    Returns:
        bfloat16 [N, K].
    """
    _check_blocks(weight, weight_scale_inv)
    rows, columns = weight.shape
    out = torch.empty(rows, columns, dtype=torch.bfloat16, device=weight.device)
    if out.numel():
        grid = (-(-rows // _TILE_ROWS), -(-columns // BLOCK))
        _kernels().dequantize[grid](
            weight, weight_scale_inv, out, rows, columns, weight_scale_inv.shape[1], ROWS=_TILE_ROWS, WIDTH=BLOCK
        )
    return out


fp8_block_to_bf16.fake(_check_blocks, lambda weight: weight.new_empty(weight.shape, dtype=torch.bfloat16))


def supports_rms_norm(x: Tensor, weight: Tensor, eps: float) -> bool:
    """BF16 rows of up to 8192 values on a GPU with Triton."""
    fits = x.dim() > 1 and x.shape[-1] == weight.shape[0] <= MAX_WIDTH
    return _runs(x, weight) and fits and x.stride(-1) == 1 and weight.is_contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`row_norm` with the plain function's arguments."""
    out: Tensor = row_norm(x.flatten(0, -2), weight, eps)
    return out.view(x.shape)


def _check_rows(x: Tensor, weight: Tensor) -> None:
    if x.dim() != 2 or tuple(weight.shape) != (x.shape[1],) or x.shape[1] > MAX_WIDTH:
        raise KernelError(f"{list(x.shape)}, {list(weight.shape)}: expected [T, H] and [H], H up to {MAX_WIDTH}")
    if not x.dtype == weight.dtype == torch.bfloat16 or x.stride(1) != 1 or not weight.is_contiguous():
        raise KernelError(f"{x.dtype}, {weight.dtype}: expected torch.bfloat16, contiguous along the last dimension")


@kernel_operation("row_norm")
def row_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of rows in float32, rounded once; the plain function rounds the quotient before its weight is applied.

    Args:
        x: bfloat16 [T, H], H up to 8192; rows may be strided.
        weight: bfloat16 [H].

    Returns:
        bfloat16 [T, H].
    """
    _check_rows(x, weight)
    tokens, size = x.shape
    out = torch.empty(tokens, size, dtype=x.dtype, device=x.device)
    if tokens:
        width = _power_of_two(size)
        warps = max(1, min(width // 512, 16))
        _kernels().norm[(tokens,)](x, weight, out, x.stride(0), size, eps, WIDTH=width, num_warps=warps)
    return out


row_norm.fake(_check_rows, lambda x: x.new_empty(x.shape))


def supports_apply_rotary_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """BF16 [B, S, (H,) D] on a GPU with Triton, D a power of two, one angle a token and pair."""
    size = x.shape[-1]
    return (
        _runs(x, cos, sin)
        and x.dim() in (3, 4)
        and x.stride(-1) == 1
        and size == _power_of_two(size)
        and tuple(cos.shape) == tuple(sin.shape) == (*x.shape[:2], *[1] * (x.dim() - 3), size // 2)
        and cos.is_contiguous()
        and sin.is_contiguous()
    )


def apply_rotary_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate_pairs` with the plain function's arguments."""
    angles = (*x.shape[:2], x.shape[-1] // 2)
    out: Tensor = rotate_pairs(x if x.dim() == 4 else x.unsqueeze(2), cos.view(angles), sin.view(angles))
    return out.view(x.shape)


def _check_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    if x.dim() != 4 or x.shape[3] != _power_of_two(x.shape[3]) or x.stride(3) != 1:
        raise KernelError(f"x is {list(x.shape)}, expected [B, S, H, D], D a power of two and contiguous")
    for name, tensor in (("cos", cos), ("sin", sin)):
        wanted = [*x.shape[:2], x.shape[3] // 2]
        if list(tensor.shape) != wanted or not tensor.is_contiguous():
            raise KernelError(f"{name} is {list(tensor.shape)}, expected {wanted}, contiguous")
    if not x.dtype == cos.dtype == sin.dtype == torch.bfloat16:
        raise KernelError(f"{x.dtype}, {cos.dtype}, {sin.dtype}: expected torch.bfloat16")


@kernel_operation("rotate_pairs")
def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (2i, 2i + 1) of the last dimension by its token's angle, in float32.

    Args:
        x: bfloat16 [B, S, H, D], D a power of two; the first three dimensions may be strided.
        cos, sin: bfloat16 [B, S, D / 2].

    Returns:
        bfloat16 [B, S, H, D].
    """
    _check_pairs(x, cos, sin)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rotate(x, cos, sin, out)
    return out


rotate_pairs.fake(_check_pairs, lambda x: x.new_empty(x.shape))


@kernel_operation("rotate_pairs_", mutates_args=("x",))
def rotate_pairs_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """`rotate_pairs` into x itself."""
    _check_pairs(x, cos, sin)
    _rotate(x, cos, sin, x)


rotate_pairs_.fake(_check_pairs)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    batch, tokens, heads, size = x.shape
    if x.numel():
        strides = *x.stride()[:3], *out.stride()[:3]
        _kernels().rotate[(batch * tokens,)](
            x, cos, sin, out, tokens, heads, *strides, PAIRS=size // 2, HEADS=_power_of_two(heads)
        )


def supports_rotate_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """What `rotate_pairs_` takes, with heads."""
    return x.dim() == 4 and supports_apply_rotary_interleaved(x, cos, sin)


def rotate_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate_pairs_` with the plain function's arguments."""
    angles = (*x.shape[:2], x.shape[-1] // 2)
    rotate_pairs_(x, cos.view(angles), sin.view(angles))
    return x


def supports_store_entries(cache: Tensor, entries: Tensor, positions: Tensor) -> bool:
    """BF16 entries for a BF16 or e4m3 cache in one piece, on a GPU with Triton."""
    return (
        _runs(entries)
        and cache.dtype in (torch.bfloat16, torch.float8_e4m3fn)
        and cache.is_contiguous()
        and positions.dtype == torch.int64
        and (cache.dtype == torch.bfloat16 or capability(cache.device.index) >= (8, 9))
    )


def store_entries(cache: Tensor, entries: Tensor, positions: Tensor) -> None:
    """`write_slots` with the plain function's arguments."""
    write_slots(cache, entries.contiguous(), positions.contiguous())


def _check_slots(cache: Tensor, entries: Tensor, positions: Tensor) -> None:
    if entries.dim() != 3 or positions.shape != entries.shape[:2] or positions.dtype != torch.int64:
        raise KernelError(f"{list(entries.shape)}, {list(positions.shape)}: expected [B, S, C] and int64 [B, S]")
    if cache.dim() != 3 or (cache.shape[0], cache.shape[2]) != (entries.shape[0], entries.shape[2]):
        raise KernelError(f"cache is {list(cache.shape)}, expected [B, T, C] for entries {list(entries.shape)}")
    if entries.dtype != torch.bfloat16 or cache.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        raise KernelError(f"{entries.dtype} into {cache.dtype}: expected torch.bfloat16 into it or torch.float8_e4m3fn")
    if not (cache.is_contiguous() and entries.is_contiguous() and positions.is_contiguous()):
        raise KernelError("cache, entries and positions must be contiguous")


@kernel_operation("write_slots", mutates_args=("cache",))
def write_slots(cache: Tensor, entries: Tensor, positions: Tensor) -> None:
    """cache[b, positions[b, s]] = entries[b, s]; a position outside the cache writes nothing.

    Args:
        cache: bfloat16 or e4m3 [B, T, C], written; e4m3 saturates at 448.
        entries: bfloat16 [B, S, C].
        positions: int64 [B, S], those of a sequence different from each other.
    """
    _check_slots(cache, entries, positions)
    batch, tokens, size = entries.shape
    if batch * tokens:
        top = E4M3_TOP if cache.dtype == torch.float8_e4m3fn else float("inf")
        _kernels().store[(batch * tokens,)](
            entries, positions, cache, tokens, cache.shape[1], size, top, WIDTH=_power_of_two(size)
        )


write_slots.fake(_check_slots)


def supports_embedding(input_ids: Tensor, weight: Tensor, first: int | None = None) -> bool:
    """A rank's BF16 rows on a GPU with Triton; the whole matrix is PyTorch's, one launch too."""
    fits = weight.is_contiguous() and weight.shape[1] <= MAX_WIDTH
    return first is not None and _runs(weight) and fits and input_ids.is_contiguous()


def embedding(input_ids: Tensor, weight: Tensor, first: int | None = None) -> Tensor:
    """`held_rows` with the plain function's arguments."""
    assert first is not None  # `supports_embedding`
    out: Tensor = held_rows(input_ids.flatten(), weight, first)
    return out.view(*input_ids.shape, weight.shape[1])


def _check_ids(input_ids: Tensor, weight: Tensor) -> None:
    if input_ids.dim() != 1 or input_ids.dtype not in (torch.int32, torch.int64) or not input_ids.is_contiguous():
        raise KernelError(f"input_ids is {input_ids.dtype} {list(input_ids.shape)}, expected contiguous integers [T]")
    if weight.dim() != 2 or weight.dtype != torch.bfloat16 or weight.shape[1] > MAX_WIDTH or not weight.is_contiguous():
        wanted = f"contiguous torch.bfloat16 [V, H], H up to {MAX_WIDTH}"
        raise KernelError(f"weight is {weight.dtype} {list(weight.shape)}, expected {wanted}")


@kernel_operation("held_rows")
def held_rows(input_ids: Tensor, weight: Tensor, first: int) -> Tensor:
    """Rows of tokens; zeros for those that are not held. Eight launches in plain PyTorch.

    Args:
        input_ids: int32 or int64 [T].
        weight: bfloat16 [V, H], H up to 8192: rows first .. first + V - 1 of the embedding.

    Returns:
        bfloat16 [T, H].
    """
    _check_ids(input_ids, weight)
    (tokens,), (rows, size) = input_ids.shape, weight.shape
    out = torch.empty(tokens, size, dtype=weight.dtype, device=weight.device)
    if tokens:
        width = _power_of_two(size)
        _kernels().embed[(tokens,)](
            input_ids, weight, out, first, rows, size, WIDTH=width, num_warps=max(1, min(width // 512, 8))
        )
    return out


held_rows.fake(_check_ids, lambda input_ids, weight: weight.new_empty(len(input_ids), weight.shape[1]))
