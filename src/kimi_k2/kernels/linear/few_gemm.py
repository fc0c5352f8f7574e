"""FP8 GEMM of one token that has the bits of `block_gemm`: `torch.ops.kimi_k2.few_gemm`.

For batch-invariant mode, where one token must be summed as many are. csrc/few_gemm.cu says how it works.
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
BLOCK, MAX_COLUMNS = 128, 8192
UNITS = 16  # of 8 rows by 8 blocks of columns, a thread block
# Values of a weight from which on `block_gemm` is as fast: not all blocks run at once.
BIG = 16_000_000


def supports(tokens: int, rows: int, columns: int, device: torch.device) -> bool:
    """Whether the kernel takes these sizes on this device, and is the faster one."""
    fits = tokens == 1 and columns <= MAX_COLUMNS and rows * columns < BIG
    return fits and block_gemm.supports(tokens, rows, columns, device)


def tiles_of(rows: int, columns: int, sms: int) -> int:
    """Tiles of eight rows a thread block: as few as let all blocks run at once, two or three of them to an SM."""
    stages = -(-columns // (8 * BLOCK))
    fits = [tiles for tiles in (1, 2, 4, 8) if tiles * stages <= UNITS]
    return next((tiles for tiles in fits if -(-rows // (8 * tiles)) <= 2 * sms), fits[-1])


def _check(x: Tensor, token_scale: Tensor | None, weight: Tensor, weight_scale_inv: Tensor) -> Tensor:
    """The empty result, if the arguments are what the kernel takes."""
    if weight.dim() != 2 or weight.shape[1] % BLOCK or weight.shape[1] > MAX_COLUMNS or weight.shape[0] % 8:
        raise KernelError(
            f"weight {list(weight.shape)}: expected [N, K], N a multiple of 8, K of {BLOCK} up to {MAX_COLUMNS}"
        )
    rows, columns = weight.shape
    if token_scale is None:
        expect("x", x, x.device, (1, columns), torch.bfloat16)
    else:
        expect("x", x, x.device, (TERMS, 1, columns), torch.float8_e4m3fn)
        expect("token_scale", token_scale, x.device, (columns // BLOCK, block_gemm.padded(1)), torch.float32)
    expect("weight", weight, x.device, (rows, columns), torch.float8_e4m3fn)
    expect("weight_scale_inv", weight_scale_inv, x.device, (-(-rows // BLOCK), columns // BLOCK), torch.float32)
    return torch.empty(1, rows, dtype=torch.bfloat16, device=x.device)


@kernel_operation("few_gemm")
def few_gemm(
    x: Tensor, weight: Tensor, weight_scale_inv: Tensor, parts: int, token_scale: Tensor | None = None
) -> Tensor:
    """`block_gemm` of one token in two terms, the same bits.

    Args:
        x: bfloat16 [1, K], K a multiple of 128 up to 8192, which is quantized here; or e4m3 [2, 1, K] with
            `token_scale`, as `quantize_groups` gives them.
        weight, weight_scale_inv: as `block_gemm` takes them.
        parts: `cluster` of the launch of `block_gemm` that is to be equalled.
        token_scale: float32 [K / 128, `block_gemm.padded(1)`].

    Returns:
        bfloat16 [1, N].

    Raises:
        KernelError: a shape or dtype that the kernel does not take, or a failed launch.
    """
    out = _check(x, token_scale, weight, weight_scale_inv)
    rows, columns = weight.shape
    tiles = tiles_of(rows, columns, hopper(x.device.index, "few_gemm")[1])
    given = x, token_scale, weight, weight_scale_inv, out
    sizes = block_gemm.padded(1), rows, columns, parts, tiles
    launch("linear/few_gemm", "kimi_few_gemm", "few_gemm", x.device, *given, *sizes)
    return out


few_gemm.fake(_check)
