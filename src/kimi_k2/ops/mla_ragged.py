"""Attention of several sequences' new tokens that lie one after the other, as serving engines batch prompts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kimi_k2.ops.mla import mla_naive_attention
from kimi_k2.ops.registry import COMPOSED, operation


class Ragged(NamedTuple):
    """Rows of B sequences, one sequence after the other.

    Attributes:
        lengths: rows of each, on the host.
        starts: int32 [B + 1], where each begins and where the last ends, on the rows' device.
    """

    lengths: tuple[int, ...]
    starts: Tensor


@operation(batch_invariant=COMPOSED)
def mla_ragged_attention(
    q_nope: Tensor, q_rope: Tensor, slots: Tensor, kv_b: Tensor, queries: Ragged, keys: Ragged, softmax_scale: float
) -> Tensor:
    """`mla_naive_attention` of each sequence, whose queries are the last of its slots.

    Args:
        q_nope: [T, H, qk_nope_head_dim].
        q_rope: [T, H, qk_rope_head_dim], rotated.
        slots: [S, kv_lora_rank + qk_rope_head_dim].
        kv_b: as `mla_naive_attention` takes it.
        queries: of the T rows.
        keys: of the S slots; each sequence has at least as many as queries.
        softmax_scale: factor of the scores.

    Returns:
        [T, H, v_head_dim].
    """
    parts = zip(q_nope.split(queries.lengths), q_rope.split(queries.lengths), slots.split(keys.lengths), strict=True)
    out = []
    for nope, rope, cache in parts:
        positions = torch.arange(len(cache) - len(nope), len(cache), device=cache.device).unsqueeze(0)
        given = nope.unsqueeze(0), rope.unsqueeze(0), cache.unsqueeze(0), kv_b, positions, softmax_scale
        out.append(mla_naive_attention(*given, whole=True).squeeze(0))
    return torch.cat(out)
