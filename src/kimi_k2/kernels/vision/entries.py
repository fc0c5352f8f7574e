"""The vision tower's kernels in the table of operations, with the plain functions' arguments."""

from __future__ import annotations

from torch import Tensor

from kimi_k2.kernels.vision import attention, packed_attention, rowwise
from kimi_k2.ops import vision
from kimi_k2.ops.vision import Segments

vision.rotated_qkv.entry("triton", takes=rowwise.supports_rotated_qkv)(rowwise.rotated_qkv)


def _add_flash(name: str, module: str) -> None:
    def takes(q: Tensor, k: Tensor, v: Tensor, segments: Segments, softmax_scale: float) -> bool:
        return attention.supports_flash(module, q)

    @vision.segment_attention.entry(name, takes=takes)
    def call(q: Tensor, k: Tensor, v: Tensor, segments: Segments, softmax_scale: float) -> Tensor:
        return attention.flash(module, q, k, v, segments, softmax_scale)


for _name, _module in attention.FLASH.items():
    _add_flash(_name, _module)

vision.segment_attention.entry(
    "cudnn", before="flash_attn", takes=lambda q, k, v, segments, softmax_scale: attention.supports_cudnn(q, segments)
)(attention.cudnn)
vision.segment_attention.entry(
    "torch_varlen", takes=lambda q, k, v, segments, softmax_scale: attention.supports_varlen(q)
)(attention.varlen)
vision.segment_attention.entry(
    "sdpa_batched", takes=lambda q, k, v, segments, softmax_scale: len(segments.lengths) > 1 and segments.uniform
)(attention.batched)
vision.rotated_attention.entry(
    "wgmma",
    takes=lambda qkv, cos, sin, segments, softmax_scale: packed_attention.supports(qkv, cos, sin),
    joins={"segment_attention": "", "rotated_qkv": ""},
)(packed_attention.rotated_attention)
vision.add_layer_norm.entry("triton", takes=rowwise.supports_add_layer_norm)(rowwise.add_layer_norm)
vision.gelu_linear.entry("cublaslt", takes=rowwise.supports_gelu_linear)(rowwise.gelu_linear)
