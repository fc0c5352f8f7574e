"""The vision tower's kernels in the table of operations, with the plain functions' arguments."""

from __future__ import annotations

from kimi_k2.kernels.vision import attention, packed_attention, rowwise
from kimi_k2.ops import vision

vision.rotated_qkv.entry("triton", takes=rowwise.supports_rotated_qkv)(rowwise.rotated_qkv)
vision.segment_attention.entry("torch_varlen", takes=attention.supports)(attention.varlen)
vision.rotated_attention.entry(
    "wgmma",
    takes=lambda qkv, cos, sin, segments, softmax_scale: packed_attention.supports(qkv, cos, sin),
    joins={"segment_attention": "", "rotated_qkv": ""},
)(packed_attention.rotated_attention)
vision.add_layer_norm.entry("triton", takes=rowwise.supports_add_layer_norm)(rowwise.add_layer_norm)
vision.gelu_linear.entry("cublaslt", takes=rowwise.supports_gelu_linear)(rowwise.gelu_linear)
