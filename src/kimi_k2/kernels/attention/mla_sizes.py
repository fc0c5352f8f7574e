"""Sizes of MLA decode attention that its kernels, their plan and their callers share."""

from __future__ import annotations

import torch

LATENT = 512
ROPE = 64
ROW = LATENT + ROPE  # of the cache
PAGE = 64  # rows
HEADS = (8, 16, 32, 64)
CACHE_DTYPES = (torch.bfloat16, torch.float8_e4m3fn)
LOG2_E = 1.4426950408889634
