"""The tower's operations: attention within the images of a packed sequence, and what kernels join to linears."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kimi_k2.ops.embedding import apply_rotary_interleaved
from kimi_k2.ops.registry import operation

Made = TypeVar("Made")


class Segments:
    """Lengths of the parts of a packed sequence, known to the host: no kernel has to ask the device for them.

    Attributes:
        lengths: of each part, in order.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = tuple(lengths)
        self._derived: dict[Hashable, Any] = {}

    def derived(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """What a kernel makes of the lengths, made once."""
        if key not in self._derived:
            self._derived[key] = make()
        made: Made = self._derived[key]
        return made

    def tiles(self, queries: int) -> Tensor:
        """int32 [tiles, 4]: first query, their number (up to `queries`), first key and number of keys.

        Tiles of longer parts come first, so that none of them is left for the end.
        """
        starts = [0, *itertools.accumulate(self.lengths)]
        rows = [
            (start + first, min(queries, length - first), start, length)
            for start, length in sorted(zip(starts, self.lengths, strict=False), key=lambda part: -part[1])
            for first in range(0, length, queries)
        ]
        return torch.tensor(rows, dtype=torch.int32)


def uploaded(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A host's tensor on the device; a GPU is not waited for."""
    if torch.device(device).type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def rotated_qkv(qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a fused projection, the first two rotated.

    Args:
        qkv: [T, 3, H, D].
        cos, sin: float32 [T, 1, D / 2]; angles stay float32, since BF16 would move a far patch by whole degrees.

    Returns:
        Three of [T, H, D] in qkv's dtype.
    """
    q, k = (apply_rotary_interleaved(qkv[:, part].float(), cos, sin).to(qkv.dtype) for part in (0, 1))
    return q, k, qkv[:, 2]


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


@operation
def rotated_attention(qkv: Tensor, cos: Tensor, sin: Tensor, segments: Segments, softmax_scale: float) -> Tensor:
    """`segment_attention` of `rotated_qkv`: [T, 3, H, D] to [T, H, D]. `qkv` may be overwritten."""
    return segment_attention(*rotated_qkv(qkv, cos, sin), segments, softmax_scale)


@operation
def add_layer_norm(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Residual sum and the LayerNorm after it.

    Args:
        x, delta: [T, D].
        weight, bias: [D].

    Returns:
        LayerNorm(x + delta) and x + delta, both [T, D].
    """
    total = x + delta
    return F.layer_norm(total, weight.shape, weight, bias, eps), total


@operation
def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu_tanh(x W^T + bias): [T, K], [N, K] and [N] to [T, N]."""
    return F.gelu(F.linear(x, weight, bias), approximate="tanh")
