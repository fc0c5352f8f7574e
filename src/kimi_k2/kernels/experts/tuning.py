"""Launch choices of the expert kernels by device, shape and token count, from per-device JSON files.

A file in `tuning_files/` is named `experts={E},inter={N},hidden={H},dtype={dtype},block={block},device={device}.json`
(spaces of the device's name become underscores) and maps token counts, as decimal strings, to choices. The entry with
the nearest token count at or above the wanted one that the sizes allow serves; above the largest, the largest.

Token counts are the model's, whatever part of its experts a rank holds: the files of one model agree in pairs per
expert at equal counts. So a shape without a file borrows that of the nearest shape of the same formats and hidden size,
of its own device before another's, with a warning. All files are of Hoppers, which differ in bandwidth alone: an H200's
choices took 125 us on an H100 where the defaults took 199 (FP8, TP8, 16 tokens, Zipf 1.3).
"""

from __future__ import annotations

import functools
import json
import math
import re
import warnings
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path

from kimi_k2.errors import KernelError

DIRECTORY = Path(__file__).parent / "tuning_files"
NAME = re.compile(r"experts=(\d+),inter=(\d+),hidden=(\d+),dtype=(\w+),block=(\w+),device=([\w.-]+)\.json")
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


def file_name(experts: int, inter: int, hidden: int, dtype: str, block: str, device: str) -> str:
    """The one name under which choices for this shape and device are looked up."""
    shape = f"experts={experts},inter={inter},hidden={hidden}"
    name = f"{shape},dtype={dtype},block={block},device={device.replace(' ', '_')}.json"
    if not NAME.fullmatch(name):
        raise KernelError(f"tuning file name {name!r} does not match {NAME.pattern!r}")
    return name


def load_choices(path: Path) -> dict[int, ExpertChoice]:
    """Token count -> choice.

    Raises:
        KernelError: the name breaks the contract, or an entry lacks a field or has an unknown one.
    """
    if not NAME.fullmatch(path.name):
        raise KernelError(f"{path}: file name does not match {NAME.pattern!r}")
    expected = {field.name for field in fields(ExpertChoice)}
    choices = {}
    for tokens, entry in json.loads(path.read_text()).items():
        if set(entry) != expected or not tokens.isdecimal():
            raise KernelError(f"{path}: entry {tokens!r} has {sorted(entry)}, expected {sorted(expected)}")
        choices[int(tokens)] = ExpertChoice(**entry)
    return choices


def save_choices(path: Path, choices: dict[int, ExpertChoice]) -> None:
    """Write a tuning file, smallest token count first, one choice a line; not a choice that the next count has too."""
    if not NAME.fullmatch(path.name):
        raise KernelError(f"{path}: file name does not match {NAME.pattern!r}")
    counts = sorted(choices)
    kept = [one for one, above in pairwise(counts) if choices[one] != choices[above]] + counts[-1:]
    lines = ",\n".join(f' "{tokens}": {json.dumps(asdict(choices[tokens]))}' for tokens in kept)
    path.write_text(f"{{\n{lines}\n}}\n")


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
    """The file nearest to `name` in experts and intermediate size, its own device's before another's; None if none is.

    Formats and hidden size must be the same.
    """

    def parts(text: str) -> tuple[int, int, tuple[str, ...], str]:
        match = NAME.fullmatch(text)
        assert match, text
        experts, inter, *rest, device = match.groups()
        return int(experts), int(inter), tuple(rest), device

    experts, inter, rest, device = parts(name)
    candidates = []
    for path in DIRECTORY.glob("*.json"):
        if NAME.fullmatch(path.name) and parts(path.name)[2] == rest:
            other = parts(path.name)
            doublings = abs(math.log2(other[0] / experts)) + abs(math.log2(other[1] / inter))
            candidates.append((doublings, other[3] != device, path.name, path))
    best = min(candidates, default=None)
    return best[3] if best and best[0] <= MAX_DOUBLINGS else None


@functools.cache
def _table(name: str) -> dict[int, ExpertChoice]:
    path = DIRECTORY / name
    if path.exists():
        return load_choices(path)
    near = nearest_file(name)
    instead = "defaults are used" if near is None else f"those of {near.name} are used"
    warnings.warn(f"no tuned choices {name}: {instead}; kimi-k2 tune writes one", stacklevel=3)
    return {} if near is None else load_choices(near)


def choose(
    tokens: int, top_k: int, experts: int, inter: int, hidden: int, *, dtype: str, block: str, device: str
) -> ExpertChoice:
    """The tuned choice for this shape, else the nearest file's, else the default (one warning a shape and device)."""
    table = _table(file_name(experts, inter, hidden, dtype, block, device))
    enough = sorted(count for count in table if count >= tokens)
    for count in enough or [max(table, default=0)]:
        choice = table.get(count)
        if choice is not None and _allowed(choice, tokens, top_k, hidden, inter):
            return choice
    return default_choice(tokens, top_k, experts, inter, hidden)


def _allowed(choice: ExpertChoice, tokens: int, top_k: int, hidden: int, inter: int) -> bool:
    try:
        choice.check(tokens, top_k, hidden, inter)
    except KernelError:
        return False
    return True
