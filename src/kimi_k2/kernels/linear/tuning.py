"""Launch choices of FP8-block linears (common/tuning.py), by tokens, and those of batch-invariant mode."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from kimi_k2.kernels.common.tuning import Files

BLOCK = 128
# Of a shape without a file: tokens that two terms take, and that `block_gemm` does.
MANY, FEW = 256, 64
# A part of the columns has at least so many of them, and parts of a weight have so many tiles of 64 rows at most.
COLUMNS, TILES, MOST_PARTS = 1536, 66, 4


@dataclass(frozen=True)
class LinearChoice:
    """How a linear is computed.

    Attributes:
        kernel: `block` for `block_gemm`, `wide` for `wide_gemm`, `cublas` for the weight dequantized.
        groups: of 64 rows of the weight in a tile; of `wide` 64 tokens.
        tile: tokens of a tile; of `wide` rows.
        cluster: blocks that share a tile, each a part of the columns.
    """

    kernel: str
    groups: int = 0
    tile: int = 0
    cluster: int = 0

    @property
    def launch(self) -> list[int]:
        """As `block_gemm` and `wide_gemm` take it."""
        return [self.groups, self.tile, self.cluster]


FILES = Files(Path(__file__).parent / "tuning_files", ("terms", "rows", "columns"), ("tokens",), LinearChoice)


def parts(rows: int, columns: int) -> int:
    """Parts of a weight's columns that fill the SMs where few tokens make one tile of 64 rows a block."""
    most = min(MOST_PARTS, TILES // -(-rows // 64), columns // COLUMNS)
    return max(1, most)


def fixed_choice(tokens: int, rows: int, columns: int, *, decoding: bool) -> LinearChoice:
    """A launch whose sums have the same order for any number of tokens, so whose parts the weight's shape gives.

    A prompt has one part. Tiles change nothing but an instruction's width.
    """
    cluster = parts(rows, columns) if decoding else 1
    if tokens <= FEW:
        return LinearChoice("block", 1, next(tile for tile in (16, 32, 64) if tokens <= tile), cluster)
    tall = -(-rows // BLOCK) * -(-tokens // BLOCK) * cluster >= TILES
    return LinearChoice("wide", 2, BLOCK, cluster) if tall else LinearChoice("wide", 1, 64, cluster)


def default_choice(terms: int, tokens: int, rows: int, columns: int) -> LinearChoice:
    """For shapes without a tuning file: that of batch-invariant mode, and cuBLAS for many tokens in two terms."""
    if terms == 2 and tokens > MANY:
        return LinearChoice("cublas")
    return fixed_choice(tokens, rows, columns, decoding=tokens <= FEW)


@functools.lru_cache(maxsize=4096)
def choose(terms: int, tokens: int, rows: int, columns: int, device: str) -> LinearChoice:
    """The tuned choice for this shape on this device, else the default."""
    table = FILES.table(FILES.name(terms, rows, columns, device=device))
    return FILES.nearest(table, tokens) or default_choice(terms, tokens, rows, columns)
