"""Attention within segments by torch's own kernel, where ours for Hopper does not take them."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kimi_k2.ops.vision import Segments


@functools.cache
def varlen_attn() -> Callable[..., Any] | None:
    """torch's function (2.10 and newer); None where it is not there."""
    try:
        return getattr(importlib.import_module("torch.nn.attention.varlen"), "varlen_attn", None)
    except ImportError:
        return None


def supports(q: Tensor, k: Tensor, v: Tensor, segments: Segments, softmax_scale: float) -> bool:
    """Half precision on a GPU, heads of a multiple of 8 values up to 256."""
    half = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    return half and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and varlen_attn() is not None


def varlen(q: Tensor, k: Tensor, v: Tensor, segments: Segments, softmax_scale: float) -> Tensor:
    """`ops.vision.segment_attention`; torch's scale is the default one, so that queries take ours."""
    function = varlen_attn()
    assert function is not None
    default = q.shape[-1] ** -0.5
    q = q if softmax_scale == default else q * (softmax_scale / default)
    offsets, longest = segments.offsets, segments.longest
    return function(q.contiguous(), k.contiguous(), v.contiguous(), offsets, offsets, longest, longest)
