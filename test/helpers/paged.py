"""Contexts of MLA decode attention in pages that are poisoned wherever no sequence has a row, and their reference."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from kimi_k2.kernels.attention.mla_sizes import LATENT, PAGE, ROW

SCALE = 0.1147
# Of contexts: one and many, empty ones, around a page, equal, a long one among short ones, drawn; up to 8,192 rows.
LENGTHS: list[list[int]] = [
    [1],
    [8192],
    [0, 0],
    [63, 64, 65],
    [5000, 1, 0, 4097, 8192, 127, 300],
    [8192, *[100] * 63],
    [1000 + 77 * i for i in range(70)],
    [random.Random(i).randrange(1, 3000) for i in range(130)],
    [i % 3 for i in range(200)],
    [1024] * 256,
    [random.Random(i).randrange(0, 200) for i in range(600)],
    [8192, 8192],
]


def paged_case(
    lengths: Sequence[int], heads: int, capacity: int, seed: int = 0, device: str = "cuda"
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(q, contiguous cache, paged cache, block table, lengths) of the same rows.

    Shuffled pages; NaN wherever no sequence has a row, table entries past an end that point nowhere.
    """
    torch.manual_seed(seed)
    batch, pages = len(lengths), -(-capacity // PAGE)
    q = torch.randn(batch, heads, ROW, device=device, dtype=torch.bfloat16)
    rows = torch.randn(batch, pages * PAGE, ROW, device=device, dtype=torch.bfloat16)
    for one, length in enumerate(lengths):
        rows[one, length:] = float("nan")
    table = torch.randperm(batch * pages, device=device).view(batch, pages).int()
    cache = torch.empty(batch * pages, PAGE, ROW, device=device, dtype=torch.bfloat16)
    cache[table.flatten().long()] = rows.view(-1, PAGE, ROW)
    for one, length in enumerate(lengths):
        table[one, -(-length // PAGE) :] = 2**31 - 1
    return q, rows, cache, table, torch.tensor(lengths, dtype=torch.int32, device=device)


def reference(q: Tensor, rows: Tensor, lengths: Sequence[int], scale: float = SCALE) -> Tensor:
    """float64 [B, H, 512]: softmax(scale * q k^T) v over the first rows of [B, T, 576], zeros for an empty context."""
    out = torch.zeros(*q.shape[:2], LATENT, device=q.device, dtype=torch.float64)
    for one, length in enumerate(lengths):
        if length:
            keys = rows[one, :length].double()
            out[one] = (scale * (q[one].double() @ keys.T)).softmax(-1) @ keys[:, :LATENT]
    return out
