"""How MLA decode attention shares out its work, by the shapes (common/tuning.py): by a plan or evenly.

The lengths are not known where this is chosen. A file's entries are therefore of capacities at which an even split
loses little where one context is long and the others are short; beyond them, and without a file, a plan follows the
lengths where it `pays`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from kimi_k2.kernels.attention import mla_cuda, mla_plan
from kimi_k2.kernels.common.tuning import Files


@dataclass(frozen=True)
class AttentionChoice:
    """How work is shared out.

    Attributes:
        splits: parts of every context; 0: by a plan.
        eights: every 8 heads are a request of their own, which reads the cache for itself.
    """

    splits: int
    eights: bool


FILES = Files(Path(__file__).parent / "tuning_files", ("heads", "cache"), ("capacity", "batch"), AttentionChoice)


def even_choice(batch: int, heads: int, capacity: int, sm_count: int) -> AttentionChoice:
    """An even split for the shapes alone."""
    if mla_cuda.by_eights(batch, heads, capacity, sm_count):
        requests = batch * heads // mla_cuda.FEW_HEADS
        return AttentionChoice(mla_cuda.choose_splits(requests, capacity, sm_count), True)
    return AttentionChoice(mla_cuda.choose_splits(batch, capacity, sm_count), False)


@functools.lru_cache(maxsize=4096)
def choose(batch: int, heads: int, capacity: int, quantized: bool, device: str, sm_count: int) -> AttentionChoice:
    """The tuned choice on this device, if it has one, else the default.

    Args:
        batch: sequences.
        heads: rows of queries a sequence, those of several tokens together.
        capacity: rows that the cache can hold of a sequence.
        quantized: the cache is e4m3.
        device: its name.
        sm_count: its SMs.
    """
    name = FILES.name(heads, "e4m3" if quantized else "bf16", device=device)
    table = FILES.table(name) if (FILES.directory / name).exists() else {}
    within = any(capacity <= most and batch <= largest for most, largest in table)
    tuned = FILES.nearest(table, capacity, batch) if within else None
    if tuned is None and mla_plan.pays(batch, capacity, heads, sm_count):
        return AttentionChoice(0, False)
    return tuned or even_choice(batch, heads, capacity, sm_count)
