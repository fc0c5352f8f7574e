"""Attention within segments by kernels that others keep: FlashAttention 3 and 2, cuDNN, torch's own, batched SDPA."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kimi_k2.kernels.common.hardware import capability
from kimi_k2.ops.vision import Segments

# Package, module and function, in the order of preference.
FLASH = {"flash_attn_3": "flash_attn_interface", "flash_attn": "flash_attn"}
TORCH_VARLEN = "torch.nn.attention.varlen"


@functools.cache
def imported(module: str, name: str) -> Callable[..., Any] | None:
    """A function of an optional module, None where it is not installed or does not load."""
    try:
        function: Callable[..., Any] | None = getattr(importlib.import_module(module), name, None)
    except (ImportError, OSError, RuntimeError):
        return None
    return function


def _half(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def supports_flash(module: str, q: Tensor) -> bool:
    """Half precision, head width a multiple of 8 up to 256, and the package is there."""
    return _half(q) and imported(module, "flash_attn_varlen_func") is not None


def flash(module: str, q: Tensor, k: Tensor, v: Tensor, segments: Segments, softmax_scale: float) -> Tensor:
    """`flash_attn_varlen_func` of either generation."""
    function = imported(module, "flash_attn_varlen_func")
    assert function is not None
    offsets, longest = segments.offsets, segments.longest
    out = function(q, k, v, offsets, offsets, longest, longest, softmax_scale=softmax_scale, causal=False)
    made: Tensor = out[0] if isinstance(out, tuple) else out  # some releases of FA3 add the log-sum-exp
    return made


def supports_varlen(q: Tensor) -> bool:
    """Half precision, and a torch that has it (2.10 and newer)."""
    return _half(q) and imported(TORCH_VARLEN, "varlen_attn") is not None


def varlen(q: Tensor, k: Tensor, v: Tensor, segments: Segments, softmax_scale: float) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn`; its scale is the default one, so that queries take ours."""
    function = imported(TORCH_VARLEN, "varlen_attn")
    assert function is not None
    default = q.shape[-1] ** -0.5
    q = q if softmax_scale == default else q * (softmax_scale / default)
    offsets, longest = segments.offsets, segments.longest
    made: Tensor = function(q.contiguous(), k.contiguous(), v.contiguous(), offsets, offsets, longest, longest)
    return made


def supports_cudnn(q: Tensor, segments: Segments) -> bool:
    """Half precision on compute capability 9.0 and newer, heads up to 128 wide, segments of one length."""
    return _half(q) and q.shape[-1] <= 128 and segments.uniform and capability(q.device.index) >= (9, 0)


def cudnn(q: Tensor, k: Tensor, v: Tensor, segments: Segments, softmax_scale: float) -> Tensor:
    """`batched` by cuDNN, which torch offers for batches only: packs of one length."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return batched(q, k, v, segments, softmax_scale)


def batched(q: Tensor, k: Tensor, v: Tensor, segments: Segments, softmax_scale: float) -> Tensor:
    """Segments of one length as one batch of SDPA."""
    shape = (len(segments.lengths), segments.longest)
    queries, keys, values = (tensor.unflatten(0, shape).transpose(1, 2) for tensor in (q, k, v))
    out = F.scaled_dot_product_attention(queries, keys, values, scale=softmax_scale)
    return out.transpose(1, 2).flatten(0, 1)
