"""Attention within the images of a packed sequence, where none is padded to another's length."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k2.ops.registry import operation
from kimi_k2.ops.rotary import apply_rotary_interleaved


class Segments:
    """Lengths of the parts of a packed sequence, known to the host: no kernel has to ask the device for them.

    Attributes:
        lengths: of each part, in order.
        longest: of them.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.lengths = tuple(lengths)
        self.longest = max(self.lengths)
        self.device = device

    @cached_property
    def offsets(self) -> Tensor:
        """int32 [parts + 1] on the device: where each part begins, and the end of the last."""
        lengths = torch.tensor((0, *self.lengths), dtype=torch.int32)
        return lengths.cumsum(0, dtype=torch.int32).to(self.device)

    @property
    def uniform(self) -> bool:
        """Whether all parts have one length."""
        return len(set(self.lengths)) == 1


@operation
def rotated_qkv(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a fused projection, the first two rotated. `qkv` may be overwritten.

    Args:
        qkv: [T, 3, H, D].
        cos, sin: float32 [T, 1, D / 2]; angles stay float32, since BF16 would move a far patch by whole degrees.

    Returns:
        Three of [T, H, D] in qkv's dtype.
    """
    q, k = (apply_rotary_interleaved(qkv[:, part].float(), cos, sin).to(qkv.dtype) for part in (0, 1))
    return q, k, qkv[:, 2]


@operation
def segment_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, softmax_scale: float) -> Tensor:
    """Attention of every token to all tokens of its own part.

    Args:
        q, k, v: [T, H, D], parts one after another.
        segments: T tokens in all.

    Returns:
        [T, H, D].
    """
    parts = (tensor.transpose(0, 1).unsqueeze(0).split(segments.lengths, dim=2) for tensor in (q, k, v))
    out = [
        F.scaled_dot_product_attention(queries, keys, values, scale=softmax_scale)
        for queries, keys, values in zip(*parts, strict=True)
    ]
    return torch.cat(out, dim=2).squeeze(0).transpose(0, 1)
