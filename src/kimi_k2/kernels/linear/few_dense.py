"""BF16 GEMM of a few tokens that has the bits of `dense_gemm`: `torch.ops.kimi_k2.few_dense`, `few_add_dense`.

For batch-invariant mode, where few tokens must be summed as many are. csrc/few_dense.cu says how it works.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.launch import expect, launch
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.linear import dense_gemm

MAX_TOKENS, MAX_COLUMNS, MIN_PARTS = 2, 8192, 4
ROWS = 64  # of an instruction: rows of the weight by parts of their columns
# Units of 8 KB that a block has on their way: what leaves room for the blocks of the launch before it.
RING = 12


def in_parts(rows: int, columns: int) -> bool:
    """Whether a weight [N, K] is summed in parts enough, that make whole instructions; else `dense_gemm` is as fast."""
    parts = dense_gemm.decode_cluster(rows, columns)
    whole = rows % (ROWS // parts) == 0 and columns % (ROWS * parts) == 0
    return parts >= MIN_PARTS and whole and columns <= MAX_COLUMNS


def supports(x: Tensor, weight: Tensor) -> bool:
    """What `dense_gemm` takes, of a few tokens and such a weight."""
    few = 0 < x.numel() // weight.shape[1] <= MAX_TOKENS
    return few and in_parts(*weight.shape) and dense_gemm.supports(x, weight)


def _check(x: Tensor, weight: Tensor, norm_weight: Tensor | None) -> Tensor:
    """The empty result, if the arguments are what the kernel takes."""
    if x.dim() != 2 or weight.dim() != 2 or not 0 < x.shape[0] <= MAX_TOKENS or weight.shape[1] > MAX_COLUMNS:
        raise KernelError(
            f"x {list(x.shape)} and weight {list(weight.shape)}: expected [T, K] and [N, K], T up to {MAX_TOKENS}, K up"
            f" to {MAX_COLUMNS}"
        )
    if (
        tuple(x.shape[1:]) != tuple(weight.shape[1:])
        or x.dtype != torch.bfloat16
        or x.stride(1) != 1
        or x.stride(0) % 8
    ):
        raise KernelError(
            f"x is {x.dtype} {tuple(x.shape)}, expected torch.bfloat16 {(x.shape[0], weight.shape[1])}, rows of whole"
            " 16 bytes"
        )
    expect("weight", weight, x.device, tuple(weight.shape), torch.bfloat16)
    if norm_weight is not None:
        expect("norm_weight", norm_weight, x.device, (x.shape[1],), torch.bfloat16)
    return torch.empty(x.shape[0], weight.shape[0], dtype=torch.bfloat16, device=x.device)


def _launch(
    name: str, x: Tensor, delta: Tensor | None, norm: Tensor | None, total: Tensor | None, weight: Tensor, out: Tensor,
    eps: float,
) -> None:  # fmt: skip
    parts = dense_gemm.decode_cluster(*weight.shape)
    ring = min(RING, weight.shape[1] // ROWS // parts)
    sizes = x.shape[0], *weight.shape, x.stride(0), parts, ring
    launch("linear/few_dense", "kimi_few_dense", name, x.device, x, delta, norm, total, weight, out, *sizes, float(eps))


@kernel_operation("few_dense")
def few_dense(x: Tensor, weight: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """`dense_gemm` in `decode_cluster` parts, the same bits; with a norm that of what `norm_apart` makes.

    Args:
        x: bfloat16 [T, K], T up to 2, K up to 8192, rows may be strided.
        weight: bfloat16 [N, K].
        norm_weight: bfloat16 [K]; None leaves the norm out.

    Returns:
        bfloat16 [T, N].

    Raises:
        KernelError: a shape or dtype that the kernel does not take, or a failed launch.
    """
    out = _check(x, weight, norm_weight)
    _launch("few_dense", x, None, norm_weight, None, weight, out, eps)
    return out


few_dense.fake(_check)


def _check_added(x: Tensor, delta: Tensor, norm_weight: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    expect("x", x, x.device, tuple(x.shape), torch.bfloat16)
    expect("delta", delta, x.device, tuple(x.shape), torch.bfloat16)
    return _check(x, weight, norm_weight), torch.empty_like(x)


@kernel_operation("few_add_dense")
def few_add_dense(x: Tensor, delta: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> tuple[Tensor, Tensor]:
    """`dense_gemm` of what `add_norm_apart` makes, times its quotients, the same bits in one launch.

    Args:
        x, weight: as `few_dense` takes them.
        delta: bfloat16 [T, K].
        norm_weight: bfloat16 [K].

    Returns:
        bfloat16 [T, N], and x + delta.

    Raises:
        KernelError: a shape or dtype that the kernel does not take, or a failed launch.
    """
    out, total = _check_added(x, delta, norm_weight, weight)
    _launch("few_add_dense", x, delta, norm_weight, total, weight, out, eps)
    return out, total


few_add_dense.fake(_check_added)
