"""Launches of the expert kernels in batch-invariant mode: what a sum's order hangs on is fixed by the weights' shape.

That is: unfused, as many parts of a stage's sums for any number of tokens. Free are the tokens of a tile, which change
the width of an instruction alone, and the slabs of an item. A decode step's first stage is summed in parts, since few
experts of few tokens have too few rows for all SMs; a prompt's is not. INT4 of few tokens multiplies in e4m3 and of
many in bfloat16, so that there a decode step has the one and a prompt the other, of any length. FP8 of many multiplies
with the operands' sides exchanged (csrc/fp8_wide.cuh), which gives the same bits.
"""

from __future__ import annotations

from dataclasses import replace

from kimi_k2.kernels.experts import bf16
from kimi_k2.kernels.experts.tuning import ExpertChoice

BLOCK = 128
# First-stage items of one token's experts, at most. Of a rank of TP8 a step of 12 layers takes 1.15, 1.08, 1.06 and
# 1.04 ms at batch 1 with 16, 32, 64 and 128 of them, and 5.52, 5.67, 5.82 and 6.01 ms at 64 (H200).
ITEMS = 32
MAX_SPLITS = 8
FEW, MANY = 32, 64  # tokens of a tile


def decode_splits(top_k: int, hidden: int, inter: int) -> int:
    """Parts of a decode step's first stage: a power of two."""
    splits = 1
    while 2 * splits * top_k * (inter // BLOCK) <= ITEMS and 2 * splits <= min(MAX_SPLITS, hidden // BLOCK):
        splits *= 2
    return splits


def fixed_choice(
    tuned: ExpertChoice, top_k: int, hidden: int, inter: int, *, decoding: bool, int4: bool = False
) -> ExpertChoice:
    """The launch next to the tuned one whose sums have the same order for any number of tokens."""
    slabs = 1 if tuned.fused else tuned.item_slabs
    if decoding:
        return ExpertChoice(False, FEW, decode_splits(top_k, hidden, inter), 1, slabs)
    tokens = max(MANY if int4 else FEW, 0 if tuned.fused else tuned.max_tokens)
    return replace(tuned, fused=False, max_tokens=tokens, splits1=1, splits2=1, item_slabs=slabs)


def fixed_bf16_launch(*, decoding: bool) -> bf16.Launch:
    """Of `moe_bf16`: tiles as for the few pairs of an expert in a decode step, or the many of a prompt."""
    return bf16.choose_launch(1 if decoding else MANY, 1)
