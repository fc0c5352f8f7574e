"""FP8-block and BF16 GEMMs for few tokens, bound by reading the weight once (replaces `model.linear`).

Up to 8 tokens (16 of a q_b, 4 with a BF16 weight, 2 with a tall one) go to csrc/linear_decode.cu, where Triton left
half of the time and more on the table. The rest is Triton: a program takes a strip of rows and walks the input
dimension: e4m3 weights are scaled and rounded to bfloat16, multiplied on the tensor cores with up to 16 tokens, and
summed in float32. Long inputs are split over programs, whose float32 parts a second launch adds in a fixed order.
RMSNorm can be part of the GEMM: the weight of the norm multiplies the tokens, and each program computes the statistics
itself.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kimi_k2.kernels.common.build import find_nvcc
from kimi_k2.kernels.common.hardware import capability, has_triton, is_hopper
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation

BLOCK = 128
MAX_TOKENS = 16
DECODE_TOKENS, DECODE_TOKENS_BF16 = 8, 4
# Rows of a bf16 weight from which on the kernel takes two tokens: a head of 20,480 rows took it 126 us for three,
# where cuBLAS behind a norm takes 83.
TALL, DECODE_TOKENS_TALL = 16384, 2
# Of an FP8 weight of this width the kernel takes more tokens.
NARROW, DECODE_TOKENS_NARROW = 1536, 16
DECODE_COLUMNS = (256, 512, 1024, 1536, 2048, 2304, 4096, 7168)


def supports_fp8_linear(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, block_size: tuple[int, int]) -> bool:
    """Up to 16 BF16 tokens on a GPU of compute capability 8.9 or later, whole 128-wide blocks along the input."""
    return (
        x.is_cuda
        and has_triton()
        and capability(x.device.index) >= (8, 9)
        and x.dtype == torch.bfloat16
        and weight.dtype == torch.float8_e4m3fn
        and tuple(block_size) == (BLOCK, BLOCK)
        and 0 < x.numel() // x.shape[-1] <= MAX_TOKENS
        and fused_linear.fits(weight=weight, weight_scale_inv=weight_scale_inv)
    )


def supports_bf16_linear(x: Tensor, weight: Tensor) -> bool:
    """Few BF16 tokens and a BF16 weight on a Hopper GPU, of a width that the CUDA kernel is compiled for."""
    return x.is_cuda and x.dtype == weight.dtype == torch.bfloat16 and x.dim() == 2 and takes_decode(x, weight)


def fp8_linear(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, block_size: tuple[int, int]) -> Tensor:
    """x [..., K] W^T for W e4m3 [N, K], scales float32 [ceil(N/128), K/128]: bfloat16 [..., N]."""
    out: Tensor = fused_linear(x.reshape(-1, x.shape[-1]), weight, weight_scale_inv)
    return out.view(*x.shape[:-1], weight.shape[0])


def choose_launch(rows: int, columns: int) -> tuple[int, int]:
    """(splits, block_rows) for Triton: the best of a sweep on H200 at T=8, as a rule over the real shapes."""
    block_rows = 16 if rows <= 1536 else 32
    limit = max(1, min(224 // -(-rows // block_rows), columns // 1024))
    return max(d for d in range(1, limit + 1) if columns // BLOCK % d == 0), block_rows


OPERANDS = (
    "x bf16[T,K] rows16, weight e4m3|bf16[N,K], weight_scale_inv f32[N/128,K/128]?, norm_weight bf16[K]?{}"
    " -> out bf16[T,N]{}; T <= 16; K % 128 == 0; (weight.dtype == bf16) == (weight_scale_inv is None)"
)


@kernel_operation("fused_linear", OPERANDS.format("", ""))
def fused_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale_inv: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    splits: int = 0,
    block_rows: int = 16,
    *,
    out: Tensor,
) -> None:
    """RMSNorm(x) W^T, or x W^T without `norm_weight`.

    Args:
        norm_weight: the quotient is applied to the finished sums, or its product with the norm's weight
            is rounded once; the plain norm rounds the quotient before that, too.
        splits, block_rows: launch of the Triton kernel, to pin it; 0 splits chooses kernel and launch.
    """
    (tokens, columns), rows = x.shape, weight.shape[0]
    if not splits and takes_decode(x, weight):
        _launch_decode(x, weight, weight_scale_inv, norm_weight, out, eps)
        return
    kernels, x = _kernels(), x.contiguous()
    if not splits:
        splits, block_rows = choose_launch(rows, columns)
    parts = out if splits == 1 else torch.empty(splits, tokens, rows, dtype=torch.float32, device=x.device)
    kernels.gemm[(-(-rows // block_rows), splits)](
        x, weight, weight_scale_inv, norm_weight, parts, tokens, rows, eps,
        COLUMNS=columns, SPLITS=splits, ROWS=block_rows, CHUNK=512 if columns // splits % 512 == 0 else BLOCK,
        num_warps=4,
    )  # fmt: skip
    if splits > 1:
        kernels.add[(-(-tokens * rows // 256),)](parts, out, tokens * rows, SPLITS=splits, WIDTH=256, num_warps=2)


def takes_decode(x: Tensor, weight: Tensor) -> bool:
    """Whether the CUDA kernel takes it: few tokens of a width it is compiled for, on a Hopper GPU."""
    most = DECODE_TOKENS
    if weight.dtype == torch.bfloat16:
        most = DECODE_TOKENS_BF16 if weight.shape[0] < TALL else DECODE_TOKENS_TALL
    elif x.shape[1] == NARROW:
        most = DECODE_TOKENS_NARROW
    few = x.shape[0] <= most and x.shape[1] in DECODE_COLUMNS
    return few and is_hopper(x.device) and find_nvcc() is not None


def _launch_decode(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    norm_weight: Tensor | None,
    out: Tensor,
    eps: float,
    delta: Tensor | None = None,
    total: Tensor | None = None,
) -> None:
    tensors = (x, delta, weight, scale, norm_weight, out, total)
    sizes = x.shape[0], weight.shape[0], weight.shape[1], x.stride(0)
    launch("linear/linear_decode", "kimi_linear_decode", "fused_linear", x.device, *tensors, *sizes, float(eps))


@kernel_operation("fused_add_linear", OPERANDS.format(", delta bf16[T,K]", ", total bf16[T,K]") + "; x.is_contiguous()")
def fused_add_linear(
    x: Tensor, delta: Tensor, weight: Tensor, weight_scale_inv: Tensor | None, norm_weight: Tensor, eps: float, *,
    out: Tensor, total: Tensor,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """RMSNorm(x + delta) W^T and x + delta, the residual sum before a layer's first GEMM."""
    if not takes_decode(x, weight):
        summed = x + delta
        return fused_linear(summed, weight, weight_scale_inv, norm_weight, eps), summed
    _launch_decode(x, weight, weight_scale_inv, norm_weight, out, eps, delta, total)
    return None


@functools.cache
def _kernels() -> Any:
    # Triton is imported at the first launch: the checks and fake implementation must work without it.
    from kimi_k2.kernels.linear import fused_linear_triton

    return fused_linear_triton
