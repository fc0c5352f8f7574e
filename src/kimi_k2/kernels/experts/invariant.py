"""Launches of the expert kernels in batch-invariant mode: what a sum's order hangs on is fixed by the weights' shape.

That is: as many parts of a stage's sums for any number of tokens; FP8 unfused. Free are the tokens of a tile, which
change the width of an instruction alone, the slabs of an item, and in INT4 whether the launch is fused. A decode step's
first stage is summed in parts, since few experts of few tokens have too few rows for all SMs; a prompt's is not. INT4
of few tokens multiplies in e4m3 and of many in bfloat16, so that there a decode step has the one and a prompt the
other, of any length. FP8 of many multiplies with the operands' sides exchanged (csrc/fp8_wide.cuh), which gives the
same bits.
"""

from __future__ import annotations

from dataclasses import replace

from kimi_k2.kernels.experts import bf16
from kimi_k2.kernels.experts.tuning import ExpertChoice

BLOCK = 128
# First-stage items of one token's experts, at most. FP8's launches of few tokens take as long whatever the number of
# parts, and of many tokens fewer parts are faster: a step of 12 layers of a rank of TP8 takes 5.49 ms at batch 64 with
# 16 of them and 5.65 with 32 (H200). INT4's few tokens have an SM for each part; of many (`INNER_TOKENS`) a block takes
# the parts one after another.
ITEMS, INT4_ITEMS = 16, 32
INNER_TOKENS = 9
MAX_SPLITS = 8
FEW, MANY = 32, 64  # tokens of a tile
SLAB = 256  # values of an output row
# Slabs of an item where the tuned launch is fused: a step of INT4 takes 2.15 ms at batch 16 with 7, 2.36 with one.
INT4_SLABS = (7, 4, 2, 1)


def decode_splits(top_k: int, hidden: int, inter: int, *, int4: bool = False) -> int:
    """Parts of a decode step's first stage: a power of two."""
    splits, most = 1, INT4_ITEMS if int4 else ITEMS
    while 2 * splits * top_k * (inter // BLOCK) <= most and 2 * splits <= min(MAX_SPLITS, hidden // BLOCK):
        splits *= 2
    return splits


def fixed_choice(
    tuned: ExpertChoice, tokens: int, top_k: int, hidden: int, inter: int, *, decoding: bool, int4: bool = False
) -> ExpertChoice:
    """The launch next to the tuned one whose sums have the same order for any number of tokens."""
    slabs = 1 if tuned.fused else tuned.item_slabs
    if decoding and int4 and tuned.fused:
        if tokens < INNER_TOKENS:
            return replace(tuned, splits1=decode_splits(top_k, hidden, inter, int4=True), splits2=1)
        slabs = next(count for count in INT4_SLABS if hidden // SLAB % count == 0)
    if decoding:
        return ExpertChoice(False, FEW, decode_splits(top_k, hidden, inter, int4=int4), 1, slabs)
    rows = max(MANY if int4 else FEW, 0 if tuned.fused else tuned.max_tokens)
    return replace(tuned, fused=False, max_tokens=rows, splits1=1, splits2=1, item_slabs=slabs)


def fixed_bf16_launch(*, decoding: bool) -> bf16.Launch:
    """Of `moe_bf16`: tiles as for the few pairs of an expert in a decode step, or the many of a prompt."""
    return bf16.choose_launch(1 if decoding else MANY, 1)
