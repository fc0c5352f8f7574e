"""The kernels for linears of few tokens in the table of operations, with the plain functions' arguments."""

from __future__ import annotations

from torch import Tensor

from kimi_k2.kernels.linear import fused_linear
from kimi_k2.ops import linear as ops_linear
from kimi_k2.ops.weights import Weight

ops_linear.fp8_linear.entry("triton_decode", takes=fused_linear.supports_fp8_linear)(fused_linear.fp8_linear)


def _linear_fits(x: Tensor, weight: Weight) -> bool:
    """FP8 blocks or BF16, few BF16 tokens."""
    if weight.fp8_block is not None:
        stored = weight.tensors["weight"], weight.tensors["weight_scale_inv"]
        return fused_linear.supports_fp8_linear(x, *stored, weight.fp8_block)
    return weight.quantization is None and fused_linear.supports_bf16_linear(x, weight.tensors["weight"])


def _supports_project(x: Tensor, weight: Weight, norm_weight: Tensor | None = None, eps: float = 1e-6) -> bool:
    return _linear_fits(x, weight)


@ops_linear.project.entry("fused_linear", takes=_supports_project, joins={"fp8_linear": "triton_decode"})
def project(x: Tensor, weight: Weight, norm_weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """`fused_linear` with or without the norm."""
    tensors = weight.tensors
    out: Tensor = fused_linear.fused_linear(x, tensors["weight"], tensors.get("weight_scale_inv"), norm_weight, eps)
    return out


def _supports_add_project(x: Tensor, delta: Tensor | None, weight: Weight, norm_weight: Tensor, eps: float) -> bool:
    return _linear_fits(x, weight)


@ops_linear.add_project.entry(
    "fused_linear", takes=_supports_add_project, joins={"add_norm": "fused", "project": "fused_linear"}
)
def add_project(
    x: Tensor, delta: Tensor | None, weight: Weight, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`fused_add_linear`; `fused_linear` where there is nothing to add."""
    stored = weight.tensors["weight"], weight.tensors.get("weight_scale_inv")
    if delta is None:
        return fused_linear.fused_linear(x, *stored, norm_weight, eps), x
    made: tuple[Tensor, Tensor] = fused_linear.fused_add_linear(x, delta, *stored, norm_weight, eps)
    return made
