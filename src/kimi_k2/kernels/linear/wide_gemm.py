"""FP8-block GEMM on the tensor cores for many tokens: `torch.ops.kimi_k2.wide_gemm`.

What `block_gemm` computes with one part of the columns, bit for bit. csrc/wide_gemm.cuh says how the launch works.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from kimi_k2.kernels.common.hardware import hopper
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation
from kimi_k2.kernels.linear import block_gemm


class Tile(NamedTuple):
    """What a block sums at a time.

    Attributes:
        groups: of 64 tokens.
        rows: of the weight.
        cluster: blocks that share it, each a part of the columns.
    """

    groups: int
    rows: int
    cluster: int = 1


# Up to so many tokens `block_gemm`, whose tiles may have fewer, is as fast or faster where `MEASURED` says nothing.
FEW = 64
# Microseconds of a launch, and by terms of a tile and of its block of 128 columns, fitted to a rank's shapes at 64 to
# 8192 tokens on an H200 (662 launches); of one group of tokens, whose blocks share an SM by twos, a block of columns
# where they do and where one has the SM to itself. The best modelled launch of this kernel and `block_gemm` takes
# 1.6 % longer than the best timed one on the mean, 18 at most, where `MEASURED` says nothing.
_LAUNCH = 1.6
_TIMES = {
    1: {
        Tile(1, 64): (0.25, 0.370, 0.215), Tile(1, 72): (0.36, 0.412, 0.272), Tile(2, 64): (0.56, 0.305),
        Tile(2, 72): (0.62, 0.360), Tile(2, 128): (0.95, 0.391), Tile(2, 144): (1.09, 0.588),
        Tile(2, 192): (1.22, 0.748),
    },
    2: {
        Tile(1, 64): (0.44, 0.510, 0.310), Tile(1, 72): (0.53, 0.550, 0.385), Tile(2, 64): (0.55, 0.446),
        Tile(2, 72): (0.57, 0.525), Tile(2, 128): (0.89, 0.678), Tile(2, 144): (1.00, 0.869),
        Tile(2, 192): (1.16, 1.132),
    },
}  # fmt: skip
TILES = tuple(_TIMES[1])
MOST_SHARED = 144  # rows of a tile that blocks may share
# Launches of a TP8 rank's shapes where the best timed one (an H200; in two terms an H100 too) is 4 % faster and more
# than the best modelled one: by terms, rows and columns, for the tokens of a `block_gemm.bucket`. None: `block_gemm`'s.
MEASURED: dict[tuple[int, int, int], dict[int, Tile | None]] = {
    (1, 4608, 7168): {128: Tile(2, 72, 2)},
    (1, 2112, 7168): {128: None, 256: Tile(1, 64)},
    (1, 1536, 1536): {128: Tile(1, 64), 256: Tile(1, 64)},
    (1, 7168, 1024): {128: Tile(1, 64)},
    (1, 7168, 256): {128: Tile(1, 64), 256: Tile(2, 128)},
    (1, 512, 7168): {512: Tile(1, 64, 2), 1024: Tile(2, 64, 2)},
    (2, 4608, 7168): {64: Tile(1, 64, 3), 96: Tile(2, 128, 3), 128: Tile(2, 72, 2)},
    (2, 2112, 7168): {128: Tile(1, 64, 2), 192: Tile(1, 64, 2), 256: Tile(2, 64, 2), 384: Tile(2, 128, 2)},
    (2, 1536, 1536): {96: None, 128: Tile(1, 64), 256: Tile(1, 72), 512: Tile(1, 64)},
    (2, 7168, 1024): {64: Tile(1, 64)},
    (2, 7168, 256): {64: Tile(1, 64), 128: Tile(2, 64), 256: Tile(1, 64), 512: Tile(2, 128)},
    (2, 7168, 2304): {64: Tile(1, 64), 256: Tile(2, 128), 384: Tile(2, 192)},
}


def modelled_time(terms: int, tokens: int, rows: int, columns: int, tile: Tile, sms: int) -> float:
    """Microseconds of a launch."""
    of_tile, step, *alone = _TIMES[terms][tile]
    count = -(-rows // tile.rows) * -(-tokens // (64 * tile.groups))
    waves, rest = divmod(count, sms * (1 + len(alone)))
    steps = columns // block_gemm.BLOCK
    last = 0.0
    if rest:
        last = of_tile + steps * (alone[0] if alone and rest <= sms else step)
    return _LAUNCH + waves * (of_tile + steps * step) + last


@functools.lru_cache(maxsize=4096)
def choose_tile(terms: int, tokens: int, rows: int, columns: int, sms: int, whole: bool = False) -> Tile:
    """The tile with the least time, measured where that is known, else modelled; `whole`: of all columns."""
    known = _measured(terms, tokens, rows, columns, sms)
    if known is not None and known[0] is not None and (known[0].cluster == 1 or not whole):
        return known[0]
    return min(TILES, key=lambda tile: modelled_time(terms, tokens, rows, columns, tile, sms))


def _measured(terms: int, tokens: int, rows: int, columns: int, sms: int) -> tuple[Tile | None] | None:
    """What `MEASURED` says, if it says anything."""
    tiles = MEASURED.get((terms, rows, columns), {}) if sms == block_gemm.MEASURED_SMS else {}
    at = block_gemm.bucket(tokens, tiles)
    return (tiles[at],) if at else None


@functools.lru_cache(maxsize=4096)
def is_faster(terms: int, tokens: int, rows: int, columns: int, sms: int, other: block_gemm.Choice) -> bool:
    """Whether it takes less time than this launch of `block_gemm`, as measured where that is known, else modelled."""
    size = terms, tokens, rows, columns
    if (known := _measured(*size, sms)) is not None:
        return known[0] is not None
    if tokens <= FEW:
        return False
    time = modelled_time(*size, choose_tile(*size, sms), sms)
    return time < block_gemm.modelled_time(*size, other, sms)


@kernel_operation("wide_gemm")
def wide_gemm(
    x: Tensor, scale: Tensor, weight: Tensor, weight_scale_inv: Tensor, tile: list[int] | None = None
) -> Tensor:
    """x W^T.

    Args:
        x, scale: e4m3 [terms, T, K] and float32 [K / 128, `padded(T)`], as `block_gemm.quantize_groups` gives them.
        weight: e4m3 [N, K], N a multiple of 8.
        weight_scale_inv: float32 [ceil(N / 128), K / 128].
        tile: one of `TILES` to pin it, shared or not; None: the best modelled one.

    Returns:
        bfloat16 [T, N].

    Raises:
        KernelError: a shape or dtype that the kernel does not take, or a failed launch.
    """
    out = block_gemm.expect_operands(x, scale, weight, weight_scale_inv)
    (terms, tokens, columns), rows = x.shape, weight.shape[0]
    if tokens:
        _, sms = hopper(x.device.index, "wide_gemm")
        chosen = Tile(*tile) if tile is not None else choose_tile(terms, tokens, rows, columns, sms)
        sizes = terms, tokens, rows, columns, scale.shape[1], *chosen, sms
        operands = x, scale, weight, weight_scale_inv, out
        launch("linear/wide_gemm", "kimi_wide_gemm", "wide_gemm", x.device, *operands, *sizes)
    return out


wide_gemm.fake(block_gemm.expect_operands)
