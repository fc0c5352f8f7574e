"""FP8-block GEMM on the tensor cores for more tokens than `fused_linear` takes: `torch.ops.kimi_k2.block_gemm`.

Weights are e4m3 with one float32 scale a 128x128 block. Tokens are e4m3 with one a group of 128 values: one term, as an
FP8 checkpoint's `activation_scheme: dynamic` says, which rounds by 2.6 %; or the sum of two, which hold bfloat16's
bits. `quantize_groups` and `add_quantize` make the tokens' side, together with the norm, the residual sum or the SwiGLU
before the GEMM. csrc/block_gemm.cuh says how the GEMM's launch works.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.build import find_nvcc
from kimi_k2.kernels.common.hardware import hopper, is_hopper
from kimi_k2.kernels.common.launch import expect, launch
from kimi_k2.kernels.common.operation import kernel_operation

BLOCK = 128
MAX_NORM = 8192
MAX_CLUSTER = 8


class Tile(NamedTuple):
    """What a block sums at a time: `groups` of 64 rows of the weight, by so many tokens."""

    groups: int
    tokens: int


def padded(tokens: int) -> int:
    """Length of a row of the tokens' scales: a tile's are copied in one piece, and tiles may end 255 tokens further."""
    return -(-(tokens + 255) // 64) * 64


def supports(tokens: int, rows: int, columns: int, device: torch.device) -> bool:
    """Whether `block_gemm` takes these sizes on this device (compute capability 9.0, nvcc)."""
    return tokens > 0 and columns % BLOCK == 0 and rows % 8 == 0 and is_hopper(device) and find_nvcc() is not None


def takes_rows(x: Tensor) -> bool:
    """Whether the quantizing kernels can read the rows of x [..., K]: BF16 values, whole 16 bytes."""
    aligned = x.stride(-1) == 1 and x.stride(-2) % 8 == 0 and x.storage_offset() % 8 == 0
    return x.dtype == torch.bfloat16 and aligned


def _rows_of(x: Tensor) -> None:
    if x.dim() != 2 or not takes_rows(x):
        raise KernelError(f"x is {x.dtype} {list(x.shape)}, expected bfloat16 [T, K], rows of whole 16 bytes")


def _expect_norm(norm_weight: Tensor | None, columns: int, device: torch.device) -> None:
    if norm_weight is None:
        return
    expect("norm_weight", norm_weight, device, (columns,), torch.bfloat16)
    if columns > MAX_NORM:
        raise KernelError(f"a norm of {columns} values, expected at most {MAX_NORM}")


def _made(terms: int, tokens: int, columns: int, device: torch.device) -> tuple[Tensor, Tensor]:
    if terms not in (1, 2):
        raise KernelError(f"{terms} terms, expected 1 or 2")
    out = torch.empty(terms, tokens, columns, dtype=torch.float8_e4m3fn, device=device)
    return out, torch.empty(columns // BLOCK, padded(tokens), dtype=torch.float32, device=device)


def _quantized(x: Tensor, norm_weight: Tensor | None, swiglu: bool, terms: int) -> tuple[Tensor, Tensor]:
    """The empty result of `quantize_groups`, if the arguments are what it takes."""
    _rows_of(x)
    columns = x.shape[1] // 2 if swiglu else x.shape[1]
    if columns % BLOCK or (swiglu and norm_weight is not None):
        raise KernelError(f"{columns} columns: expected a multiple of {BLOCK}, and not both a norm and SwiGLU")
    _expect_norm(norm_weight, columns, x.device)
    return _made(terms, x.shape[0], columns, x.device)


@kernel_operation("quantize_groups")
def quantize_groups(
    x: Tensor, norm_weight: Tensor | None = None, eps: float = 1e-6, swiglu: bool = False, terms: int = 1
) -> tuple[Tensor, Tensor]:
    """x, RMSNorm(x) or silu(gate) * up in e4m3, by groups of 128 values: scale = amax / 448.

    Args:
        x: bfloat16 [T, K], K a multiple of 128, rows may be strided; [T, 2 K], gate before up, with `swiglu`.
        norm_weight: bfloat16 [K], K up to 8192; None leaves the norm out.
        terms: 1, or 2 for another e4m3 value of what the first leaves, by the same scale.

    Returns:
        e4m3 [terms, T, K] and float32 [K / 128, `padded(T)`].

    Raises:
        KernelError: a shape or dtype that the kernel does not take, or a failed launch.
    """
    out, scale = _quantized(x, norm_weight, swiglu, terms)
    if x.shape[0]:
        sizes = (*out.shape[1:], x.stride(0), scale.shape[1], terms, int(swiglu), 0)
        operands = x, None, norm_weight, None, out, scale
        launch("linear/quantize", "kimi_quantize", "quantize_groups", x.device, *operands, *sizes, float(eps))
    return out, scale


quantize_groups.fake(_quantized)


def _added(
    x: Tensor, delta: Tensor, norm_weight: Tensor, terms: int, apart: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    _rows_of(x)
    expect("delta", delta, x.device, tuple(x.shape), torch.bfloat16)
    expect("x", x, x.device, tuple(x.shape), torch.bfloat16)
    if x.shape[1] % BLOCK:
        raise KernelError(f"{x.shape[1]} columns: expected a multiple of {BLOCK}")
    _expect_norm(norm_weight, x.shape[1], x.device)
    return (torch.empty_like(x), *_made(terms, x.shape[0], x.shape[1], x.device))


@kernel_operation("add_quantize")
def add_quantize(
    x: Tensor, delta: Tensor, norm_weight: Tensor, eps: float, terms: int = 1, apart: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """x + delta, and RMSNorm(x + delta) as `quantize_groups` gives it.

    Args:
        x, delta: bfloat16 [T, K], K a multiple of 128 up to 8192.
        norm_weight: bfloat16 [K].
        terms: as `quantize_groups` takes them.
        apart: the norm's quotient is part of the scales alone, so that a GEMM's sums may begin before it is known.

    Returns:
        bfloat16 [T, K]; e4m3 [terms, T, K]; float32 [K / 128, `padded(T)`].

    Raises:
        KernelError: a shape or dtype that the kernel does not take, or a failed launch.
    """
    total, out, scale = _added(x, delta, norm_weight, terms)
    if x.shape[0]:
        operands = x, delta, norm_weight, total, out, scale
        sizes = (*x.shape, x.shape[1], scale.shape[1], terms, 0, int(apart))
        launch("linear/quantize", "kimi_quantize", "add_quantize", x.device, *operands, *sizes, float(eps))
    return total, out, scale


add_quantize.fake(_added)


# By terms: a block of columns in two of them takes about what twice the tokens take in one.
TILES = {
    1: (
        Tile(1, 16), Tile(1, 32), Tile(1, 64), Tile(1, 128), Tile(2, 32), Tile(2, 64), Tile(2, 96), Tile(2, 128),
        Tile(2, 192), Tile(2, 256),
    ),
    2: (Tile(1, 16), Tile(1, 32), Tile(1, 64), Tile(2, 32), Tile(2, 64), Tile(2, 96), Tile(2, 128)),
}  # fmt: skip


def expect_operands(x: Tensor, scale: Tensor, weight: Tensor, weight_scale_inv: Tensor) -> Tensor:
    """The empty result, if the arguments are what the kernel takes."""
    if x.dim() != 3 or x.shape[0] not in (1, 2) or weight.dim() != 2 or x.shape[2] % BLOCK or weight.shape[0] % 8:
        raise KernelError(
            f"x {list(x.shape)} and weight {list(weight.shape)}: expected [1 or 2, T, K] and [N, K], K a multiple of"
            f" {BLOCK}, N of 8"
        )
    (terms, tokens, columns), rows = x.shape, weight.shape[0]
    expect("x", x, x.device, (terms, tokens, columns), torch.float8_e4m3fn)
    expect("scale", scale, x.device, (columns // BLOCK, padded(tokens)), torch.float32)
    expect("weight", weight, x.device, (rows, columns), torch.float8_e4m3fn)
    expect("weight_scale_inv", weight_scale_inv, x.device, (-(-rows // BLOCK), columns // BLOCK), torch.float32)
    return torch.empty(tokens, rows, dtype=torch.bfloat16, device=x.device)


@kernel_operation("block_gemm")
def block_gemm(x: Tensor, scale: Tensor, weight: Tensor, weight_scale_inv: Tensor, choice: list[int]) -> Tensor:
    """x W^T.

    Args:
        x, scale: e4m3 [terms, T, K] and float32 [K / 128, `padded(T)`], as `quantize_groups` gives them.
        weight: e4m3 [N, K], N a multiple of 8.
        weight_scale_inv: float32 [ceil(N / 128), K / 128].
        choice: of a tile of `TILES[terms]` the groups of 64 rows and the tokens, and blocks that share it, each a part
            of the columns.

    Returns:
        bfloat16 [T, N].

    Raises:
        KernelError: a shape or dtype that the kernel does not take, or a failed launch.
    """
    out = expect_operands(x, scale, weight, weight_scale_inv)
    (terms, tokens, columns), rows = x.shape, weight.shape[0]
    if not tokens:
        return out
    _, sms = hopper(x.device.index, "block_gemm")
    sizes = terms, tokens, rows, columns, scale.shape[1], *choice, sms
    launch(
        "linear/block_gemm", "kimi_block_gemm", "block_gemm", x.device, x, scale, weight, weight_scale_inv, out, *sizes
    )
    return out


block_gemm.fake(expect_operands)
