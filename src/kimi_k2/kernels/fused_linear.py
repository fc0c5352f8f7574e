"""FP8-block and BF16 products for few tokens, bound by reading the weight once: Triton (replaces `model.linear`).

A program takes a strip of rows and walks the input dimension: e4m3 weights are scaled and rounded to bfloat16,
multiplied on the tensor cores with up to 16 tokens, and summed in float32. Long inputs are
split over programs, whose float32 parts a second launch adds in a fixed order. RMSNorm can be part of the product:
the weight of the norm multiplies the tokens, and each program computes the statistics itself.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from kimi_k2.errors import KernelError

BLOCK = 128
MAX_TOKENS = 16


def supports_fp8_linear(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, block_size: tuple[int, int]) -> bool:
    """Up to 16 BF16 tokens on a GPU of compute capability 8.9 or later, whole 128-wide blocks along the input."""
    return (
        x.is_cuda
        and importlib.util.find_spec("triton") is not None
        and torch.cuda.get_device_capability(x.device) >= (8, 9)
        and x.dtype == torch.bfloat16
        and weight.dtype == torch.float8_e4m3fn
        and tuple(block_size) == (BLOCK, BLOCK)
        and 0 < x.numel() // x.shape[-1] <= MAX_TOKENS
        and weight.shape[1] % BLOCK == 0
    )


def fp8_linear(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, block_size: tuple[int, int]) -> Tensor:
    """x [..., K] W^T for W e4m3 [N, K], scales float32 [ceil(N/128), K/128]: bfloat16 [..., N]."""
    out: Tensor = fused_linear(x.reshape(-1, x.shape[-1]), weight, weight_scale_inv)
    return out.view(*x.shape[:-1], weight.shape[0])


def choose_splits(rows: int, columns: int, block_rows: int, multiprocessors: int = 132) -> int:
    """Parts of the input dimension, so that about two programs a multiprocessor share the weight evenly."""
    blocks = columns // BLOCK
    wanted = max(1, 2 * multiprocessors // -(-rows // block_rows))
    return max(d for d in range(1, blocks + 1) if blocks % d == 0 and d <= wanted)


def _check(x: Tensor, weight: Tensor, scale: Tensor | None, norm_weight: Tensor | None) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise KernelError(f"x {list(x.shape)} and weight {list(weight.shape)}: expected [T, K] and [N, K]")
    if not 0 <= x.shape[0] <= MAX_TOKENS or weight.shape[1] % BLOCK:
        raise KernelError(f"{x.shape[0]} tokens of {x.shape[1]}: expected at most {MAX_TOKENS}, a multiple of {BLOCK}")
    stored = torch.bfloat16 if scale is None else torch.float8_e4m3fn
    if x.dtype != torch.bfloat16 or weight.dtype != stored:
        raise KernelError(f"x is {x.dtype} and weight {weight.dtype}, expected torch.bfloat16 and {stored}")
    if not weight.is_contiguous() or not x.is_contiguous():
        raise KernelError("x and weight must be contiguous")
    grid = (-(-weight.shape[0] // BLOCK), weight.shape[1] // BLOCK)
    if scale is not None and (tuple(scale.shape) != grid or scale.dtype != torch.float32):
        raise KernelError(f"scale is {scale.dtype} {list(scale.shape)}, expected float32 {list(grid)}")
    if norm_weight is not None and tuple(norm_weight.shape) != (x.shape[1],):
        raise KernelError(f"norm_weight is {list(norm_weight.shape)}, expected {[x.shape[1]]}")


@torch.library.custom_op("kimi_k2::fused_linear", mutates_args=(), device_types="cuda")
def fused_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale_inv: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    splits: int = 0,
    block_rows: int = 16,
) -> Tensor:
    """RMSNorm(x) W^T, or x W^T without `norm_weight`.

    Args:
        x: bfloat16 [T, K], T up to 16, K a multiple of 128.
        weight: e4m3 [N, K] with `weight_scale_inv` float32 [ceil(N/128), K/128], or bfloat16 [N, K] without.
        norm_weight: bfloat16 [K]: the quotient is rounded to bfloat16 before it is applied, as the plain norm does.
        splits, block_rows: launch; 0 splits chooses.

    Returns:
        bfloat16 [T, N].

    Raises:
        KernelError: a shape or dtype that the kernel does not take.
    """
    _check(x, weight, weight_scale_inv, norm_weight)
    (tokens, columns), rows = x.shape, weight.shape[0]
    out = torch.empty(tokens, rows, dtype=torch.bfloat16, device=x.device)
    if not tokens:
        return out
    splits = splits or choose_splits(rows, columns, block_rows)
    kernels = _kernels()
    parts = out if splits == 1 else torch.empty(splits, tokens, rows, dtype=torch.float32, device=x.device)
    kernels.product[(-(-rows // block_rows), splits)](
        x, weight, weight_scale_inv, norm_weight, parts, tokens, rows, eps,
        COLUMNS=columns, SPLITS=splits, ROWS=block_rows, CHUNK=512 if columns // splits % 512 == 0 else BLOCK,
        num_warps=4,
    )  # fmt: skip
    if splits > 1:
        kernels.add[(-(-tokens * rows // 256),)](parts, out, tokens * rows, SPLITS=splits, WIDTH=256, num_warps=2)
    return out


@fused_linear.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    weight_scale_inv: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    splits: int = 0,
    block_rows: int = 16,
) -> Tensor:
    _check(x, weight, weight_scale_inv, norm_weight)
    return x.new_empty((x.shape[0], weight.shape[0]))


@functools.cache
def _kernels() -> Any:
    # Triton is imported at the first launch: the checks and fake implementation must work without it.
    from kimi_k2.kernels import fused_linear_triton

    return fused_linear_triton
