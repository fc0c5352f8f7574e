"""The vision tower's kernels in the table of operations, with the plain functions' arguments."""

from __future__ import annotations

from kimi_k2.kernels.vision import packed_attention, rowwise
from kimi_k2.ops import vision

vision.rotated_attention.entry("wgmma", takes=packed_attention.supports)(packed_attention.rotated_attention)
vision.add_layer_norm.entry("triton", takes=rowwise.supports_add_layer_norm)(rowwise.add_layer_norm)
vision.gelu_linear.entry("cublaslt", takes=rowwise.supports_gelu_linear)(rowwise.gelu_linear)
