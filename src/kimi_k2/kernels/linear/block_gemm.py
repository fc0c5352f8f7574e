"""FP8-block GEMM on the tensor cores for more tokens than `fused_linear` takes: `torch.ops.kimi_k2.block_gemm`.

Weights are e4m3 with one float32 scale a 128x128 block. Tokens are e4m3 with one a group of 128 values: one term, as an
FP8 checkpoint's `activation_scheme: dynamic` says, which rounds by 2.6 %; or the sum of two, which hold bfloat16's
bits. `quantize_groups` and `add_quantize` make the tokens' side, together with the norm, the residual sum or the SwiGLU
before the GEMM. csrc/block_gemm.cuh says how the GEMM's launch works.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.kernels.common.hardware import hopper, runs_cuda
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation

BLOCK = 128
MAX_NORM = 8192


def padded(tokens: int) -> int:
    """Length of a row of the tokens' scales: a tile's are copied in one piece, and tiles may end 255 tokens further."""
    return -(-(tokens + 255) // 64) * 64


def supports(tokens: int, rows: int, columns: int, device: torch.device) -> bool:
    """Whether `block_gemm` takes these sizes on this device (compute capability 9.0, nvcc)."""
    return tokens > 0 and columns % BLOCK == 0 and rows % 8 == 0 and runs_cuda(device)


def takes_rows(x: Tensor) -> bool:
    """Whether the quantizing kernels can read the rows of x [..., K]: BF16 values, whole 16 bytes."""
    aligned = x.stride(-1) == 1 and x.stride(-2) % 8 == 0 and x.storage_offset() % 8 == 0
    return x.dtype == torch.bfloat16 and aligned


ROWS = "-> out e4m3[terms,T,K], scale f32[K/128,P]; K % 128 == 0; terms in (1, 2)"


def _groups(T: int, G: int, swiglu: bool) -> dict[str, int]:
    """Length of a row of the scales, and columns of the result."""
    return {"P": padded(T), "K": G // 2 if swiglu else G}


@kernel_operation(
    "quantize_groups",
    f"x bf16[T,G] rows16, norm_weight bf16[G]? {ROWS.replace('K % 128', 'G % (256 if swiglu else 128)')};"
    " norm_weight is None or G <= 8192 and not swiglu",
    also=_groups,
)
def quantize_groups(
    x: Tensor,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    swiglu: bool = False,
    terms: int = 1,
    *,
    out: Tensor,
    scale: Tensor,
) -> None:
    """x, RMSNorm(x) or silu(gate) * up in e4m3, by groups of 128 values: scale = amax / 448.

    Args:
        x: [T, K]; [T, 2 K], gate before up, with `swiglu`.
        norm_weight: None leaves the norm out.
        terms: 1, or 2 for another e4m3 value of what the first leaves, by the same scale.

    Returns:
        e4m3 [terms, T, K] and float32 [K / 128, `padded(T)`].
    """
    sizes = (*out.shape[1:], x.stride(0), scale.shape[1], terms, int(swiglu), 0)
    operands = x, None, norm_weight, None, out, scale
    launch("linear/quantize", "kimi_quantize", "quantize_groups", x.device, *operands, *sizes, float(eps))


@kernel_operation(
    "add_quantize",
    f"x bf16[T,K], delta bf16[T,K], norm_weight bf16[K] -> total bf16[T,K], {ROWS[3:]}; K <= 8192",
    also=lambda T: {"P": padded(T)},
)
def add_quantize(
    x: Tensor, delta: Tensor, norm_weight: Tensor, eps: float, terms: int = 1, apart: bool = False, *, total: Tensor,
    out: Tensor, scale: Tensor,
) -> None:  # fmt: skip
    """x + delta, and RMSNorm(x + delta) as `quantize_groups` gives it.

    Args:
        terms: as `quantize_groups` takes them.
        apart: the norm's quotient is part of the scales alone, so that a GEMM's sums may begin before it is known.

    Returns:
        bfloat16 [T, K]; e4m3 [terms, T, K]; float32 [K / 128, `padded(T)`].
    """
    operands = x, delta, norm_weight, total, out, scale
    sizes = (*x.shape, x.shape[1], scale.shape[1], terms, 0, int(apart))
    launch("linear/quantize", "kimi_quantize", "add_quantize", x.device, *operands, *sizes, float(eps))


# Tokens that a block multiplies at a time, by 64 rows of the weight.
TILES = (16, 32, 64)


# A GEMM of FP8 blocks and tokens of `quantize_groups`: a row of the scales is P = `padded(T)` long.
PRODUCT = (
    "x e4m3[terms,T,K], scale f32[K/128,P], weight e4m3[N,K], weight_scale_inv f32[N/128,K/128] -> out bf16[T,N];"
    " K % 128 == 0; N % 8 == 0; terms in (1, 2); P == (T + 318) // 64 * 64"
)


def launch_product(
    library: str, x: Tensor, scale: Tensor, weight: Tensor, weight_scale_inv: Tensor, choice: list[int], out: Tensor
) -> None:
    """Launch the kernel of a library, "linear/block_gemm" or "linear/wide_gemm"."""
    (terms, tokens, columns), rows, name = x.shape, weight.shape[0], library.rpartition("/")[2]
    sizes = terms, tokens, rows, columns, scale.shape[1], *choice, hopper(x.device.index, name)[1]
    launch(library, f"kimi_{name}", name, x.device, x, scale, weight, weight_scale_inv, out, *sizes)


@kernel_operation("block_gemm", PRODUCT)
def block_gemm(
    x: Tensor, scale: Tensor, weight: Tensor, weight_scale_inv: Tensor, choice: list[int], *, out: Tensor
) -> None:
    """x W^T.

    Args:
        x, scale: as `quantize_groups` gives them.
        choice: 1 for one group of 64 rows, one of `TILES`, and blocks that share a tile, each a part of the columns.
    """
    launch_product("linear/block_gemm", x, scale, weight, weight_scale_inv, choice, out)
