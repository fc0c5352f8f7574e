"""MLA decode over an e4m3 cache by FlashMLA, which vLLM brings: queries and weights are rounded to e4m3 too.

Stands for `ops.mla_decode.mla_decode` and `ops.mla_paged.paged_mla_decode` where it is pinned
(`KIMI_K2_KERNELS=mla_decode=flash_mla`): a result is off by about 3.5 % where ours is by 0.2 %. Many heads over many
rows take less time so; everything else goes to ours.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.attention.mla_decode import LATENT, PAGE, mla_decode
from kimi_k2.kernels.attention.mla_plan import mla_plan, pays

# Below so many heads, or sequences times slots, ours is faster.
MIN_HEADS, MIN_ROWS = 32, 2**17
BLOCK = 1024


@functools.cache
def library() -> Any:
    """The operations of vLLM's FlashMLA for e4m3, or None; vLLM itself is not imported."""
    spec = importlib.util.find_spec("vllm")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(folder).glob("_flashmla_extension_C*.so")):
            try:
                torch.ops.load_library(str(path))
            except OSError:  # built for another PyTorch
                continue
            return torch.ops._flashmla_extension_C  # noqa: SLF001
    return None


def serves(batch: int, capacity: int, heads: int, cache: Tensor) -> bool:
    """Whether FlashMLA takes these sizes and is expected to be faster."""
    fits = cache.dtype == torch.float8_e4m3fn and capacity % PAGE == 0 and heads >= MIN_HEADS
    return fits and batch * capacity >= MIN_ROWS and library() is not None


def plan(seq_lens: Tensor, cache: Tensor, capacity: int, heads: int) -> Tensor | None:
    """What `attend` follows: FlashMLA's int32 [parts * 8 + B + 1], or `mla_plan`'s.

    Args:
        seq_lens: int32 [B].
        cache: of any layer.
        capacity: rows that it can hold of a sequence.
        heads: of the queries.
    """
    batch = seq_lens.shape[0]
    if serves(batch, capacity, heads, cache):
        parts, splits = library().get_mla_decoding_metadata_dense_fp8(seq_lens, heads, 1)
        return torch.cat((parts.flatten(), splits))
    made: Tensor | None = None
    if pays(batch, capacity, heads):
        made = mla_plan(seq_lens, capacity, heads, cache.dtype != torch.bfloat16)
    return made


@functools.cache
def _pages(batch: int, pages: int, device: torch.device) -> Tensor:
    """The table of a cache in one piece."""
    return torch.arange(batch * pages, dtype=torch.int32, device=device).view(batch, pages)


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones(1, device=device)


@functools.cache
def _kernels() -> Any:
    return importlib.import_module("kimi_k2.kernels.attention.flash_mla_triton")


def rounded(query: Tensor) -> Tensor:
    """The nearest finite e4m3 values."""
    out = torch.empty_like(query, dtype=torch.float8_e4m3fn)
    count = query.numel()
    _kernels().round_values[(-(-count // BLOCK),)](query, out, count, BLOCK=BLOCK)
    return out


def attend(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor | None,
    seq_lens: Tensor,
    softmax_scale: float,
    made: Tensor | None,
) -> Tensor:
    """Attention of one query a sequence over its first `seq_lens` slots.

    Args:
        query: bfloat16 [B, H, 576].
        cache: bfloat16 or e4m3, pages [P, 64, 576] with `block_table`, else [B, T, 576].
        block_table: int32 [B, pages].
        seq_lens: int32 [B].
        softmax_scale: multiplies the scores.
        made: of `plan` over these lengths and this cache.

    Returns:
        bfloat16 [B, H, 512].

    Raises:
        KernelError: sizes that neither kernel takes, or a plan that is not FlashMLA's where it is wanted.
    """
    batch, heads = query.shape[:2]
    capacity = cache.shape[1] if block_table is None else block_table.shape[1] * PAGE
    if not serves(batch, capacity, heads, cache):
        ours: Tensor = mla_decode(query, cache, seq_lens, softmax_scale, block_table, plan=made)
        return ours
    if made is None:
        made = plan(seq_lens, cache, capacity, heads)
    if made is None or made.dim() != 1:
        found = None if made is None else list(made.shape)
        raise KernelError(f"plan is {found}, expected flash_mla's int32 [parts * 8 + {batch + 1}]")
    if block_table is None:
        block_table, cache = _pages(batch, capacity // PAGE, cache.device), cache.view(-1, PAGE, cache.shape[-1])
    parts, splits = made[: -batch - 1].view(-1, 8), made[-batch - 1 :]
    one = _one(query.device)
    out: Tensor = library().fwd_kvcache_mla_fp8(
        rounded(query).unsqueeze(1), cache.unsqueeze(2), LATENT, seq_lens, block_table, softmax_scale, True, parts,
        splits, one, one,
    )[0]  # fmt: skip
    return out.view(batch, heads, LATENT)
