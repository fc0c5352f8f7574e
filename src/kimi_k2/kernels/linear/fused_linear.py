"""FP8-block and BF16 GEMMs for few tokens, bound by reading the weight once (replaces `model.linear`).

Up to 8 tokens (16 of a q_b, 4 with a BF16 weight, 2 with a tall one) of the widths that csrc/linear_decode.cu is made
for. RMSNorm and the residual sum before it can be part of the GEMM: the weight of the norm multiplies the tokens, and
each block computes the statistics itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.hardware import runs_cuda
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation

DECODE_TOKENS, DECODE_TOKENS_BF16 = 8, 4
# Rows of a bf16 weight from which on the kernel takes two tokens: a head of 20,480 rows took it 126 us for three,
# where cuBLAS behind a norm takes 83.
TALL, DECODE_TOKENS_TALL = 16384, 2
# Of an FP8 weight of this width the kernel takes more tokens.
NARROW, DECODE_TOKENS_NARROW = 1536, 16
DECODE_COLUMNS = (256, 512, 1024, 1536, 2048, 2304, 4096, 7168)


def most_tokens(weight: Tensor) -> int:
    """Tokens that the kernel takes of a weight [N, K]; 0 of a width that it is not compiled for."""
    rows, columns = weight.shape
    if columns not in DECODE_COLUMNS:
        return 0
    if weight.dtype == torch.bfloat16:
        return DECODE_TOKENS_BF16 if rows < TALL else DECODE_TOKENS_TALL
    return DECODE_TOKENS_NARROW if columns == NARROW else DECODE_TOKENS


def supports(x: Tensor, weight: Tensor, weight_scale_inv: Tensor | None = None) -> bool:
    """Few BF16 tokens [..., K] and an FP8 or BF16 weight on a Hopper GPU, of a width that the kernel is made for."""
    return (
        x.dtype == torch.bfloat16
        and 0 < x.numel() // x.shape[-1] <= most_tokens(weight)
        and fused_linear.fits(weight=weight, weight_scale_inv=weight_scale_inv)
        and runs_cuda(x.device)
    )


def fp8_linear(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, block_size: tuple[int, int]) -> Tensor:
    """x [..., K] W^T for W e4m3 [N, K], scales float32 [ceil(N/128), K/128]: bfloat16 [..., N]."""
    out: Tensor = fused_linear(x.reshape(-1, x.shape[-1]), weight, weight_scale_inv)
    return out.view(*x.shape[:-1], weight.shape[0])


def _check_tokens(T: int, weight: Tensor) -> None:
    if most_tokens(weight) < T:
        raise KernelError(f"{T} tokens, weight {list(weight.shape)}: expected at most {most_tokens(weight)} tokens")


OPERANDS = (
    "x bf16[T,K] rows16, weight e4m3|bf16[N,K], weight_scale_inv f32[N/128,K/128]?, norm_weight bf16[K]?{}"
    " -> out bf16[T,N]{}; (weight.dtype == bf16) == (weight_scale_inv is None)"
)


@kernel_operation("fused_linear", OPERANDS.format("", ""), also=_check_tokens)
def fused_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale_inv: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    out: Tensor,
) -> None:
    """RMSNorm(x) W^T, or x W^T without `norm_weight`.

    Args:
        norm_weight: the quotient is applied to the finished sums; the plain norm rounds it before that.
    """
    operands = x, None, weight, weight_scale_inv, norm_weight, out, None
    sizes = x.shape[0], *weight.shape, x.stride(0), float(eps)
    launch("linear/linear_decode", "kimi_linear_decode", "fused_linear", x.device, *operands, *sizes)


@kernel_operation(
    "fused_add_linear",
    OPERANDS.format(", delta bf16[T,K]", ", total bf16[T,K]") + "; x.is_contiguous()",
    also=_check_tokens,
)
def fused_add_linear(
    x: Tensor, delta: Tensor, weight: Tensor, weight_scale_inv: Tensor | None, norm_weight: Tensor, eps: float, *,
    out: Tensor, total: Tensor,
) -> None:  # fmt: skip
    """RMSNorm(x + delta) W^T and x + delta, the residual sum before a layer's first GEMM."""
    operands = x, delta, weight, weight_scale_inv, norm_weight, out, total
    sizes = x.shape[0], *weight.shape, x.stride(0), float(eps)
    launch("linear/linear_decode", "kimi_linear_decode", "fused_add_linear", x.device, *operands, *sizes)
