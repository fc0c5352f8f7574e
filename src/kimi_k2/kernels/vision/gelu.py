"""A linear whose GELU is the GEMM's epilogue: cuBLASLt's `GELU_BIAS` is the tanh form."""

from __future__ import annotations

import torch
from torch import Tensor


def supports_gelu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Half precision matrices on a GPU."""
    return (
        x.is_cuda
        and x.dim() == 2
        and x.dtype == weight.dtype == bias.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
    )


def gelu_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`ops.vision.gelu_linear`; the GELU is taken of the float32 sum, not of one rounded to x's dtype."""
    # PyTorch offers the epilogue under no public name.
    made: Tensor = torch._addmm_activation(bias, x, weight.t(), use_gelu=True)  # noqa: SLF001
    return made
