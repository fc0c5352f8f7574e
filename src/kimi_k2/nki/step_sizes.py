"""Zeros at the sizes of one rank of 64, to run the decode step's kernels over for their counts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import torch

HIDDEN, EXPERTS, TOP_K, BLOCKS = 7168, 384, 8, 56
Q_RANK, RANK, ROPE, NOPE, VALUE = 1536, 512, 64, 128, 128
DOWNS = Q_RANK + RANK + ROPE
RANKS = 64
OWN = HIDDEN // RANKS  # columns of the residual
SHARED = 32  # columns of the shared expert

bfloat16 = partial(np.zeros, dtype=ml_dtypes.bfloat16)
float32 = partial(np.zeros, dtype=np.float32)
fp8 = partial(np.zeros, dtype=ml_dtypes.float8_e4m3)
ones = partial(np.ones, dtype=np.float32)


@dataclass(frozen=True)
class Form:
    """What a step's kernels take.

    Attributes:
        attention: "bfloat16", or "fp8" with the checkpoint's scales.
        tokens: of the sequence: one, or drafts to be verified with it.
        apart: a call for each layer, over a cache in pages.
    """

    attention: str = "bfloat16"
    tokens: int = 1
    apart: bool = False

    def weight(self, *shape: int) -> Any:
        """Zeros of attention's type."""
        return fp8(shape) if self.attention == "fp8" else bfloat16(shape)

    def scales(self, *shape: int) -> Any:
        """Scales, where attention's weights have any."""
        return ones(shape) if self.attention == "fp8" else None


@dataclass(frozen=True)
class ExpertShape:
    """A preset's experts on a rank.

    Attributes:
        width: of one.
        chosen: of each token's 8 slots, those whose expert the rank holds.
        others: whether other ranks hold some.
    """

    width: int
    chosen: tuple[tuple[int, ...], ...]
    others: bool

    @property
    def count(self) -> int:
        """Experts that the rank is given."""
        return max(map(len, self.chosen)) if self.others else TOP_K

    def index(self) -> Any:
        """Expert n in the n-th of a token's `chosen`, and others elsewhere: int32 [T, 8]."""
        index = np.empty((len(self.chosen), TOP_K), dtype=np.int32)
        for token, chosen in enumerate(self.chosen):
            local, other = iter(range(self.count)), iter(range(self.count, EXPERTS))
            index[token] = [next(local if slot in chosen else other) for slot in range(TOP_K)]
        return index

    def hidden(self) -> Any:
        """Residuals by which each token has logits of its own, float32 [T, H]."""
        hidden = float32((len(self.chosen), HIDDEN))
        np.fill_diagonal(hidden, 1.0)
        return hidden

    def early_residual(self) -> Any:
        """The router's weights of the residual's columns, by which it chooses `index`, float32 [OWN, E]."""
        weights = float32((OWN, EXPERTS))
        for token, numbers in enumerate(self.index()):
            weights[token, numbers] = np.arange(TOP_K, 0, -1) / 200  # the norm makes it 85 times as much
        return weights


def norms() -> tuple[Any, Any]:
    """Weights of q_a's and kv_a's norms."""
    return bfloat16(Q_RANK), bfloat16(RANK)


def queries(form: Form) -> tuple[Any, ...]:
    """q_b, its scales, W_UK, its scales."""
    return (
        form.weight(128, Q_RANK // 128, NOPE + ROPE), form.scales(128, 2, Q_RANK // 128),
        form.weight(1, NOPE, 1, RANK), form.scales(1, 128, RANK // 128, 1),
    )  # fmt: skip


def values(form: Form) -> tuple[Any, ...]:
    """W_UV, its scales, o_proj, its scales."""
    return (
        form.weight(1, 128, RANK // 128, VALUE), form.scales(1, 128, 1, RANK // 128),
        form.weight(VALUE, 1, HIDDEN), form.scales(128, BLOCKS, 1),
    )  # fmt: skip


def early_router(shape: ExpertShape) -> tuple[Any, Any]:
    """Weights of the residual's columns and of the head."""
    return shape.early_residual(), float32((VALUE, EXPERTS))


def cache(slots: int) -> tuple[Any, Any]:
    """Latents and keys of one sequence."""
    return bfloat16((1, slots, RANK)), bfloat16((1, slots, ROPE))


def lengths(slots: int) -> Any:
    """All slots in use."""
    return torch.full((1, 1), slots, dtype=torch.int32)


def routed(shape: ExpertShape) -> tuple[Any, ...]:
    """gate and up, their scales, down, its scales."""
    count, width = shape.count, shape.width
    tiles = fp8((count, 128, BLOCKS, 2 * width)), ones((count, 2, BLOCKS))
    return (*tiles, fp8((count, width, HIDDEN)), ones((count, BLOCKS)))


def shared() -> tuple[Any, ...]:
    """The shared expert's gate and up, their scales, down, its scales."""
    return fp8((128, BLOCKS, 2 * SHARED)), ones((2, BLOCKS)), fp8((SHARED, HIDDEN)), ones(BLOCKS)
