"""What lies between the GEMMs at prefill, one launch each, where plain PyTorch takes five to ten.

FP8 blocks to BF16, RMSNorm, RoPE, the cache's new entries and a rank's rows of the embedding: entries of the dispatch
table for their plain functions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.kernels.common.hardware import capability, has_triton
from kimi_k2.kernels.common.launch import triton_kernels
from kimi_k2.kernels.common.operation import kernel_operation

BLOCK = 128
E4M3_TOP = 448.0
_TILE_ROWS = 32


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
    return (
        weight.is_cuda
        and tuple(block_size) == (BLOCK, BLOCK)
        and dtype == torch.bfloat16
        and fp8_block_to_bf16.fits(weight=weight, weight_scale_inv=weight_scale_inv)
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
    return fp8_block_to_bf16(weight, weight_scale_inv)


@kernel_operation("fp8_block_to_bf16", "weight e4m3[N,K], weight_scale_inv f32[N/128,K/128] -> out bf16[N,K]")
def fp8_block_to_bf16(weight: Tensor, weight_scale_inv: Tensor, *, out: Tensor) -> None:
    """Every block times its scale, formed in float32 and rounded once: the plain function's bits."""
    rows, columns = weight.shape
    grid = (-(-rows // _TILE_ROWS), -(-columns // BLOCK))
    triton_kernels("rowwise/prefill").dequantize[grid](
        weight, weight_scale_inv, out, rows, columns, weight_scale_inv.shape[1], ROWS=_TILE_ROWS, WIDTH=BLOCK
    )


def supports_rms_norm(x: Tensor, weight: Tensor, eps: float) -> bool:
    """BF16 rows of up to 8192 values on a GPU with Triton."""
    return _runs(x, weight) and x.dim() > 1 and row_norm.fits(x=x, weight=weight)


@kernel_operation("row_norm", "x bf16[*S,H] rows, weight bf16[H] -> out bf16[*S,H]; H <= 8192; len(S) > 0")
def row_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor) -> None:
    """RMSNorm of rows in float32, rounded once; the plain function rounds the quotient before its weight is applied."""
    rows = x.flatten(0, -2)
    tokens, size = rows.shape
    width = _power_of_two(size)
    warps = max(1, min(width // 512, 16))
    triton_kernels("rowwise/prefill").norm[(tokens,)](
        rows, weight, out, rows.stride(0), size, eps, WIDTH=width, num_warps=warps
    )


def supports_apply_rotary_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """BF16 [B, S, (H,) D] on a GPU with Triton, D a power of two, one angle a token and pair."""
    if not _runs(x, cos, sin) or x.dim() not in (3, 4) or cos.dim() != x.dim():
        return False
    with_heads = x if x.dim() == 4 else x.unsqueeze(2)
    cos, sin = (angle.squeeze(2) if x.dim() == 4 else angle for angle in (cos, sin))
    return rotate_pairs.fits(x=with_heads, cos=cos, sin=sin)


def apply_rotary_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate_pairs` with the plain function's arguments."""
    angles = (*x.shape[:2], x.shape[-1] // 2)
    out: Tensor = rotate_pairs(x if x.dim() == 4 else x.unsqueeze(2), cos.view(angles), sin.view(angles))
    return out.view(x.shape)


@kernel_operation(
    "rotate_pairs",
    "x bf16[B,S,H,D] rows, cos bf16[B,S,D/2], sin bf16[B,S,D/2] -> out bf16[B,S,H,D]; D & (D - 1) == 0",
)
def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor) -> None:
    """Turn each pair (2i, 2i + 1) of the last dimension by its token's angle, in float32."""
    batch, tokens, heads, size = x.shape
    strides = *x.stride()[:3], *out.stride()[:3]
    triton_kernels("rowwise/prefill").rotate[(batch * tokens,)](
        x, cos, sin, out, tokens, heads, *strides, PAIRS=size // 2, HEADS=_power_of_two(heads)
    )


def supports_rotate_and_store(
    q: Tensor, kv_a: Tensor, kv_norm: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, cache: Tensor, eps: float
) -> bool:
    """BF16 for a BF16 or e4m3 cache, on a GPU with Triton."""
    given = {"q": q, "kv_a": kv_a, "kv_norm": kv_norm, "cos": cos, "sin": sin, "slots": slots, "cache": cache}
    return _runs(q, kv_a, kv_norm, cos, sin) and queries_and_entries.fits(**given) and _stores(cache)


def _stores(cache: Tensor) -> bool:
    return cache.dtype == torch.bfloat16 or capability(cache.device.index) >= (8, 9)


def rotate_and_store(
    q: Tensor, kv_a: Tensor, kv_norm: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, cache: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`queries_and_entries` with the plain function's results."""
    return q, queries_and_entries(q, kv_a, kv_norm, cos, sin, slots, cache, eps)


@kernel_operation(
    "queries_and_entries",
    "q bf16[T,H,Q], kv_a bf16[T,C] rows, kv_norm bf16[R], cos bf16[T,E], sin bf16[T,E], slots i64[T],"
    " cache bf16|e4m3[N,P,C] -> entries bf16[T,C]; C == R + 2 * E; Q > 2 * E; R & (R - 1) == 0; E & (E - 1) == 0",
    mutates_args=("q", "cache"),
)
def queries_and_entries(
    q: Tensor, kv_a: Tensor, kv_norm: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, cache: Tensor, eps: float, *,
    entries: Tensor,
) -> None:  # fmt: skip
    """Rotate the last 2 E values of each query, in place, and make and store the entries; five launches apart.

    Args:
        kv_a: latent before its norm | key before RoPE.
        slots: different from each other, numbered through the cache; one outside it writes nothing.
        cache: written; e4m3 saturates at 448.
    """
    tokens, heads, size = q.shape
    (rank,), pairs = kv_norm.shape, cos.shape[1]
    triton_kernels("rowwise/prefill").expand[(tokens,)](
        q, kv_a, kv_norm, cos, sin, slots, cache, entries, kv_a.stride(0), cache.shape[0] * cache.shape[1], heads, size,
        eps, _top(cache), RANK=rank, PAIRS=pairs, HEADS=_power_of_two(heads), num_warps=max(1, min(heads // 16, 4)),
    )  # fmt: skip


def _top(cache: Tensor) -> float:
    return E4M3_TOP if cache.dtype == torch.float8_e4m3fn else float("inf")


def supports_store_entries(cache: Tensor, entries: Tensor, positions: Tensor) -> bool:
    """BF16 entries for a BF16 or e4m3 cache in one piece, on a GPU with Triton."""
    return _runs(entries) and write_slots.fits(cache=cache, positions=positions) and _stores(cache)


@kernel_operation(
    "write_slots",
    "entries bf16[B,S,C] rows, positions i64[B,S] rows, cache bf16|e4m3[B,T,C]",
    mutates_args=("cache",),
)
def write_slots(cache: Tensor, entries: Tensor, positions: Tensor) -> None:
    """cache[b, positions[b, s]] = entries[b, s]; a position outside the cache writes nothing.

    Args:
        cache: written; e4m3 saturates at 448.
        positions: those of a sequence different from each other.
    """
    batch, tokens, size = entries.shape
    if batch * tokens:
        given = entries.contiguous(), positions.contiguous(), cache
        triton_kernels("rowwise/prefill").store[(batch * tokens,)](
            *given, tokens, cache.shape[1], size, _top(cache), WIDTH=_power_of_two(size)
        )


def supports_embedding(input_ids: Tensor, weight: Tensor, first: int | None = None) -> bool:
    """A rank's BF16 rows on a GPU with Triton; the whole matrix is PyTorch's, one launch too."""
    return first is not None and _runs(weight) and held_rows.fits(input_ids=input_ids, weight=weight)


@kernel_operation("held_rows", "input_ids i32|i64[*S], weight bf16[V,H] -> out bf16[*S,H]; H <= 8192")
def held_rows(input_ids: Tensor, weight: Tensor, first: int, *, out: Tensor) -> None:
    """Rows of tokens, zeros for those that are not held. Eight launches in plain PyTorch.

    Args:
        weight: rows first .. first + V - 1 of the embedding.
    """
    rows, size = weight.shape
    width = _power_of_two(size)
    triton_kernels("rowwise/prefill").embed[(input_ids.numel(),)](
        input_ids, weight, out, first, rows, size, WIDTH=width, num_warps=max(1, min(width // 512, 8))
    )
