"""Launch choices of the expert kernels (common/tuning.py), by the tokens of a call.

Token counts are the model's, whatever part of its experts a rank holds: the files of one model agree in pairs per
expert at equal counts. So a shape without a file borrows that of the nearest shape of the same formats and hidden size
on its own device, with a warning.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.tuning import Files

MAX_FUSED_PAIRS = 512
# Most doublings of experts or intermediate size over which choices are borrowed.
MAX_DOUBLINGS = 2.0


@dataclass(frozen=True)
class ExpertChoice:
    """How one launch of the expert kernel is laid out.

    Attributes:
        fused: one launch that aligns and quantizes by itself (at most 512 pairs); otherwise prepare, main, combine.
        max_tokens: tokens of one expert that share a pass over its weights: 16 fused; 32, 64, 128 or (FP8 alone) 256
            otherwise.
        splits1: parts of the hidden dimension that the first stage sums separately.
        splits2: parts of the intermediate dimension that the second stage sums separately.
        item_slabs: slabs of 256 output rows that one second-stage work item covers (at most, where FP8's launch sums
            slab after slab).
    """

    fused: bool
    max_tokens: int
    splits1: int
    splits2: int
    item_slabs: int

    def check(self, tokens: int, top_k: int, hidden: int, inter: int) -> None:
        """Raises KernelError naming the first field that this shape does not allow."""
        allowed = (16,) if self.fused else (32, 64, 128, 256)
        if self.max_tokens not in allowed:
            raise KernelError(f"max_tokens is {self.max_tokens}, expected one of {allowed} with fused={self.fused}")
        if self.fused and tokens * top_k > MAX_FUSED_PAIRS:
            raise KernelError(f"fused takes at most {MAX_FUSED_PAIRS} token-expert pairs, got {tokens * top_k}")
        if not 1 <= self.splits1 <= hidden // 128:
            raise KernelError(f"splits1 is {self.splits1}, expected 1..{hidden // 128} for hidden {hidden}")
        if not 1 <= self.splits2 <= inter // 128:
            raise KernelError(f"splits2 is {self.splits2}, expected 1..{inter // 128} for intermediate {inter}")
        if self.item_slabs < 1 or (hidden // 256) % self.item_slabs:
            raise KernelError(f"item_slabs is {self.item_slabs}, expected a divisor of {hidden // 256}")


FILES = Files(
    Path(__file__).parent / "tuning_files", ("experts", "inter", "hidden", "dtype", "block"), ("tokens",), ExpertChoice
)


def default_choice(tokens: int, top_k: int, experts: int, inter: int, hidden: int) -> ExpertChoice:
    """A choice from counts alone, for shapes without a tuning file."""
    pairs = tokens * top_k
    fused = pairs <= MAX_FUSED_PAIRS
    chosen = experts * (1.0 - (1.0 - 1.0 / experts) ** pairs)  # expected distinct experts
    cells = chosen * (inter // 128)
    # Enough first-stage items to occupy 132 SMs about once.
    splits1 = next((s for s in (1, 2, 4, 8) if cells * s >= 100), 8) if fused else 1
    per_expert = pairs / max(chosen, 1.0)
    rows = 16 if fused else 32 if per_expert <= 20 else 64 if per_expert <= 64 else 128
    slabs = hidden // 256
    item_slabs = 1 if inter > 512 else next(s for s in (2, 1) if slabs % s == 0)
    splits2 = min(4, inter // 128) if fused and chosen < 4 and inter > 512 else 1
    return ExpertChoice(fused, rows, min(splits1, hidden // 128), splits2, item_slabs)


def nearest_file(name: str) -> Path | None:
    """Of the same device, formats and hidden size the file nearest in experts and intermediate size, if one is near."""

    def parts(text: str) -> tuple[int, int, tuple[str, ...]]:
        experts, inter, *rest = FILES.parsed(text) or ()
        return int(experts), int(inter), tuple(rest)

    experts, inter, rest = parts(name)
    candidates = []
    for path in FILES.directory.glob("*.json"):
        if FILES.parsed(path.name) and parts(path.name)[2] == rest:
            other = parts(path.name)
            doublings = abs(math.log2(other[0] / experts)) + abs(math.log2(other[1] / inter))
            candidates.append((doublings, path.name, path))
    best = min(candidates, default=None)
    return best[2] if best and best[0] <= MAX_DOUBLINGS else None


@functools.lru_cache(maxsize=4096)
def choose(
    tokens: int, top_k: int, experts: int, inter: int, hidden: int, *, dtype: str, block: str, device: str
) -> ExpertChoice:
    """The tuned choice for this shape, else the nearest file's, else the default (one warning a shape and device)."""
    table = FILES.table(FILES.name(experts, inter, hidden, dtype, block, device=device), nearest_file)
    allowed = {sizes: choice for sizes, choice in table.items() if _allowed(choice, tokens, top_k, hidden, inter)}
    chosen = FILES.nearest(allowed, tokens)
    return default_choice(tokens, top_k, experts, inter, hidden) if chosen is None else chosen


def choices(
    pinned: list[int] | None, shape: tuple[int, ...], dtype: str, block: str, device: str
) -> Callable[[int], ExpertChoice]:
    """The choice for so many tokens of a call of this shape: the fields of one, in order, or else `choose`'s."""
    if pinned is not None:
        fixed = ExpertChoice(bool(pinned[0]), *pinned[1:])
        return lambda _: fixed
    _, top_k, experts, hidden, inter = shape
    return lambda count: choose(count, top_k, experts, inter, hidden, dtype=dtype, block=block, device=device)


def _allowed(choice: ExpertChoice, tokens: int, top_k: int, hidden: int, inter: int) -> bool:
    try:
        choice.check(tokens, top_k, hidden, inter)
    except KernelError:
        return False
    return True
