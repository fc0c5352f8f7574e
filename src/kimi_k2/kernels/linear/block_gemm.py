"""FP8-block GEMM on the tensor cores for more tokens than `fused_linear` takes: `torch.ops.kimi_k2.block_gemm`.

Weights are e4m3 with one float32 scale a 128x128 block. Tokens are e4m3 with one a group of 128 values: one term, as an
FP8 checkpoint's `activation_scheme: dynamic` says, which rounds by 2.6 %; or the sum of two, which hold bfloat16's
bits. `quantize_groups` and `add_quantize` make the tokens' side, together with the norm, the residual sum or the SwiGLU
before the GEMM. csrc/block_gemm.cuh says how the GEMM's launch works.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
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


class Choice(NamedTuple):
    """How a launch is laid out.

    Attributes:
        groups: of 64 rows of the weight in a tile, 1 or 2.
        tile: tokens of a tile, which with `groups` is one of `TILES[terms]`.
        cluster: blocks that share a tile, each a part of the columns.
    """

    groups: int
    tile: int
    cluster: int


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


# Microseconds, fitted to a sweep of all launches of one term over a rank's shapes at 16 to 4096 tokens on an H200
# (weights from memory, medians of graph replays): it chooses launches that take 1.3 % longer than the best on the mean,
# 17 at most. Of a block of columns where one block has the SM and where two share it; of a tile besides.
_STEP = {
    Tile(1, 16): (0.184, 0.261), Tile(1, 32): (0.191, 0.299), Tile(1, 64): (0.216, 0.395), Tile(1, 128): (0.381, 0.623),
    Tile(2, 32): (0.254,), Tile(2, 64): (0.325,), Tile(2, 96): (0.522,), Tile(2, 128): (0.579,),
    Tile(2, 192): (0.825,), Tile(2, 256): (1.037,),
}  # fmt: skip
_TILE = {
    Tile(1, 16): 1.11, Tile(1, 32): 1.03, Tile(1, 64): 1.29, Tile(1, 128): 1.90, Tile(2, 32): 1.47, Tile(2, 64): 1.95,
    Tile(2, 96): 1.68, Tile(2, 128): 2.55, Tile(2, 192): 2.98, Tile(2, 256): 3.60,
}  # fmt: skip
# By terms. A block of columns in two of them takes about what twice the tokens take in one: as many bytes and products.
TILES = {1: tuple(_STEP), 2: tuple(tile for tile in _STEP if (tile.groups, 2 * tile.tokens) in _STEP)}
_SHARE, _SHARE_TOKENS = 1.08, 0.0115  # of a cluster's sum, and a block and token of it
# Of the blocks that fit on all SMs, how many do in clusters of three and more, which must not straddle SM groups.
_PACKED = 0.76


def modelled_time(terms: int, tokens: int, rows: int, columns: int, choice: Choice, sms: int) -> float:
    """Microseconds of a launch; infinite for clusters that would not run all at once."""
    tile, cluster = Tile(choice.groups, choice.tile), choice.cluster
    step = _STEP[Tile(tile.groups, tile.tokens * terms)]
    count, steps = -(-rows // (64 * tile.groups)) * -(-tokens // tile.tokens), -(-columns // BLOCK // cluster)
    resident = len(step) * sms
    if cluster > 1 and count * cluster > resident * (1.0 if cluster == 2 else _PACKED):
        return float("inf")
    waves, rest = divmod(count * cluster, resident)
    alone = len(step) > 1 and 0 < rest <= sms  # the last wave has an SM to itself
    waves += rest > 0
    time = waves * (_TILE[tile] + steps * step[-1]) - alone * steps * (step[-1] - step[0])
    return time + (cluster > 1) * (_SHARE + _SHARE_TOKENS * cluster * tile.tokens)


# Launches of a TP8 rank's shapes where the best timed one (an H200, 502 launches at 16 to 256 tokens; in two terms an
# H100 too, all launches at 40 to 1,024) is 4 to 20 % faster than the best modelled one: by terms, rows and columns; for
# more than half of so many tokens up to as many, the fewest that there are.
MEASURED = {
    (2, 1536, 1536): {96: Choice(1, 32, 1), 256: Choice(1, 32, 1)},
    (2, 512, 7168): {64: Choice(1, 32, 4), 256: Choice(1, 32, 3)},
    (2, 7168, 256): {16: Choice(1, 16, 1)},
    (2, 4608, 7168): {32: Choice(1, 32, 2)},
    (1, 1536, 1536): {64: Choice(1, 32, 1)},
    (1, 512, 7168): {64: Choice(1, 32, 4)},
    (1, 4608, 7168): {64: Choice(1, 64, 2)},
    (1, 7168, 2304): {128: Choice(1, 64, 1)},
}
MEASURED_SMS = 132


def bucket(tokens: int, known: Collection[int]) -> int:
    """Of numbers of tokens that something is known for, the one that stands for these; 0 if none does."""
    return min((most for most in known if most < 2 * tokens <= 2 * most), default=0)


@functools.lru_cache(maxsize=4096)
def choose_launch(terms: int, tokens: int, rows: int, columns: int, sms: int) -> Choice:
    """The launch with the least time, measured where that is known, else modelled."""
    known = MEASURED.get((terms, rows, columns), {}) if sms == MEASURED_SMS else {}
    if at := bucket(tokens, known):
        return known[at]
    most = min(MAX_CLUSTER, columns // BLOCK)
    choices = [Choice(*tile, cluster) for tile in TILES[terms] for cluster in range(1, most + 1)]
    return min(choices, key=lambda choice: modelled_time(terms, tokens, rows, columns, choice, sms))


# Tokens of decode steps that one number of parts is to serve.
_STEPS = (1, 16, 64, 128, 256)


@functools.lru_cache(maxsize=4096)
def fixed_launch(terms: int, tokens: int, rows: int, columns: int, sms: int, decoding: bool) -> Choice:
    """A launch whose sums have the same order for any number of tokens.

    That is, whose `cluster` the weight's shape gives: in a decode step the one that loses least against the best launch
    at any batch, for a prompt one block. Tiles change nothing but an instruction's width.
    """
    clusters = range(1, min(MAX_CLUSTER, columns // BLOCK) + 1) if decoding else range(1, 2)

    def of(count: int, cluster: int) -> tuple[float, Choice]:
        made = [Choice(*tile, cluster) for tile in TILES[terms]]
        return min((modelled_time(terms, count, rows, columns, one, sms), one) for one in made)

    def loss(cluster: int) -> float:
        best = {count: min(of(count, one)[0] for one in clusters) for count in _STEPS}
        return max(of(count, cluster)[0] / best[count] for count in _STEPS)

    return of(tokens, min(clusters, key=loss))[1]


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
def block_gemm(
    x: Tensor, scale: Tensor, weight: Tensor, weight_scale_inv: Tensor, choice: list[int] | None = None
) -> Tensor:
    """x W^T.

    Args:
        x, scale: e4m3 [terms, T, K] and float32 [K / 128, `padded(T)`], as `quantize_groups` gives them.
        weight: e4m3 [N, K], N a multiple of 8.
        weight_scale_inv: float32 [ceil(N / 128), K / 128].
        choice: the fields of `Choice` in order, to pin the launch; None: the best modelled one.

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
    chosen = Choice(*choice) if choice is not None else choose_launch(terms, tokens, rows, columns, sms)
    sizes = terms, tokens, rows, columns, scale.shape[1], *chosen, sms
    launch(
        "linear/block_gemm", "kimi_block_gemm", "block_gemm", x.device, x, scale, weight, weight_scale_inv, out, *sizes
    )
    return out


block_gemm.fake(expect_operands)
