"""A Linear's weight from its stored tensors, whatever the format."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.quantization.config import Fp8BlockQuantization, Int4GroupQuantization, Quantization
from kimi_k2.quantization.fp8_block import dequantize_fp8_block
from kimi_k2.quantization.int4_group import dequantize_int4_group


def dequantize_stored(stored: dict[str, Tensor], quantization: Quantization | None, dtype: torch.dtype) -> Tensor:
    """A Linear's weight from its stored tensors.

    Args:
        stored: by suffix: `weight`, with `weight_scale_inv` for FP8; or `weight_packed`, `weight_scale` and
            `weight_shape` for INT4. Leading dimensions (experts) are allowed.
        quantization: of the checkpoint; None or an unquantized module needs `weight` alone.
        dtype: of the result.
    """
    if "weight_packed" in stored:
        assert isinstance(quantization, Int4GroupQuantization)
        shape = tuple(stored["weight_shape"].tolist())
        return dequantize_int4_group(
            stored["weight_packed"], stored["weight_scale"], shape, quantization.group_size, dtype
        )
    if "weight_scale_inv" in stored:
        assert isinstance(quantization, Fp8BlockQuantization)
        block = quantization.weight_block_size
        return dequantize_fp8_block(stored["weight"], stored["weight_scale_inv"], block, dtype)
    return stored["weight"].to(dtype)
