"""FP8 GEMM of a few tokens that has the bits of `block_gemm`: `torch.ops.kimi_k2.few_gemm`.

For batch-invariant mode, where few tokens must be summed as many are. csrc/few_gemm.cu says how it works.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.hardware import hopper
from kimi_k2.kernels.common.launch import expect, launch
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.linear import block_gemm

TERMS = 2
BLOCK, MAX_COLUMNS, MAX_TOKENS = 128, 8192, 3
# Tokens up to which it is faster than `block_gemm`: quantized before, quantized here, and behind a residual sum.
QUANTIZED_TOKENS, PLAIN_TOKENS, ADDED_TOKENS = 2, 2, 3
UNITS = 16  # of 8 rows by 8 blocks of columns, a thread block
THREADS = 256
# Values of a weight from which on `block_gemm` is as fast: not all blocks run at once.
BIG = 16_000_000


def supports(tokens: int, rows: int, columns: int, device: torch.device, *, quantized: bool) -> bool:
    """Whether the kernel takes these sizes on this device, and is the faster one."""
    fits = columns <= MAX_COLUMNS and rows * columns < BIG
    if quantized:
        fits = fits and 0 < tokens <= QUANTIZED_TOKENS and tokens * columns <= THREADS * BLOCK
    else:
        fits = fits and 0 < tokens <= PLAIN_TOKENS and tokens * columns <= MAX_COLUMNS
    return fits and block_gemm.supports(tokens, rows, columns, device)


def tiles_of(rows: int, columns: int, sms: int, resident: int = 2) -> int:
    """Tiles of eight rows a thread block: as few as let all blocks run at once, so many of them to an SM."""
    stages = -(-columns // (8 * BLOCK))
    fits = [tiles for tiles in (1, 2, 4, 8) if tiles * stages <= UNITS]
    return next((tiles for tiles in fits if -(-rows // (8 * tiles)) <= resident * sms), fits[-1])


def _check(x: Tensor, token_scale: Tensor | None, weight: Tensor, weight_scale_inv: Tensor) -> Tensor:
    """The empty result, if the arguments are what the kernel takes."""
    if weight.dim() != 2 or weight.shape[1] % BLOCK or weight.shape[1] > MAX_COLUMNS or weight.shape[0] % 8:
        raise KernelError(
            f"weight {list(weight.shape)}: expected [N, K], N a multiple of 8, K of {BLOCK} up to {MAX_COLUMNS}"
        )
    rows, columns = weight.shape
    tokens = x.shape[-2] if x.dim() > 1 else 0
    if not 0 < tokens <= MAX_TOKENS:
        raise KernelError(f"{tokens} tokens: expected 1 to {MAX_TOKENS}")
    if token_scale is None:
        expect("x", x, x.device, (tokens, columns), torch.bfloat16)
    else:
        expect("x", x, x.device, (TERMS, tokens, columns), torch.float8_e4m3fn)
        expect("token_scale", token_scale, x.device, (columns // BLOCK, block_gemm.padded(tokens)), torch.float32)
    expect("weight", weight, x.device, (rows, columns), torch.float8_e4m3fn)
    expect("weight_scale_inv", weight_scale_inv, x.device, (-(-rows // BLOCK), columns // BLOCK), torch.float32)
    return torch.empty(tokens, rows, dtype=torch.bfloat16, device=x.device)


@kernel_operation("few_gemm")
def few_gemm(
    x: Tensor, weight: Tensor, weight_scale_inv: Tensor, parts: int, token_scale: Tensor | None = None
) -> Tensor:
    """`block_gemm` of a few tokens in two terms, the same bits.

    Args:
        x: bfloat16 [T, K], T up to 3, K a multiple of 128, T * K up to 8192, which is quantized here; or e4m3
            [2, T, K], K up to 8192, with `token_scale`, as `quantize_groups` gives them.
        weight, weight_scale_inv: as `block_gemm` takes them.
        parts: `cluster` of the launch of `block_gemm` that is to be equalled.
        token_scale: float32 [K / 128, `block_gemm.padded(T)`].

    Returns:
        bfloat16 [T, N].

    Raises:
        KernelError: a shape or dtype that the kernel does not take, or a failed launch.
    """
    out = _check(x, token_scale, weight, weight_scale_inv)
    rows, columns = weight.shape
    tiles = tiles_of(rows, columns, hopper(x.device.index, "few_gemm")[1])
    given = x, token_scale, weight, weight_scale_inv, out
    sizes = len(out), block_gemm.padded(len(out)), rows, columns, parts, tiles
    launch("linear/few_gemm", "kimi_few_gemm", "few_gemm", x.device, *given, *sizes)
    return out


few_gemm.fake(_check)


def _check_added(
    x: Tensor, delta: Tensor, norm_weight: Tensor, weight: Tensor, weight_scale_inv: Tensor
) -> tuple[Tensor, Tensor]:
    expect("delta", delta, x.device, tuple(x.shape), torch.bfloat16)
    expect("norm_weight", norm_weight, x.device, (weight.shape[1],), torch.bfloat16)
    return _check(x, None, weight, weight_scale_inv), torch.empty_like(x)


@kernel_operation("few_add_gemm")
def few_add_gemm(
    x: Tensor,
    delta: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    weight_scale_inv: Tensor,
    parts: int,
) -> tuple[Tensor, Tensor]:
    """`block_gemm` of what `add_quantize` makes of a few tokens in two terms, `apart`: the same bits in one launch.

    Args:
        x, delta: bfloat16 [T, K], T up to 3, K a multiple of 128 up to 8192.
        norm_weight: bfloat16 [K].
        weight, weight_scale_inv, parts: as `few_gemm` takes them.

    Returns:
        bfloat16 [T, N], and x + delta.

    Raises:
        KernelError: a shape or dtype that the kernel does not take, or a failed launch.
    """
    out, total = _check_added(x, delta, norm_weight, weight, weight_scale_inv)
    rows, columns = weight.shape
    sms = hopper(x.device.index, "few_add_gemm")[1]
    sizes = len(x), rows, columns, parts, tiles_of(rows, columns, sms, 1)
    given = x, delta, norm_weight, total, weight, weight_scale_inv, out
    launch("linear/few_gemm", "kimi_few_add_gemm", "few_add_gemm", x.device, *given, *sizes, float(eps))
    return out, total


few_add_gemm.fake(_check_added)
