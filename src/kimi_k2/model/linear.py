"""A Linear whose weight may be stored as FP8 blocks, INT4 groups or floats, under the checkpoint's own names."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kimi_k2.checkpoint.names import linear_specs
from kimi_k2.config import KimiK2Config
from kimi_k2.ops.registry import dispatched
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


@dispatched("fp8_linear")
def fp8_linear(x: Tensor, weight: Tensor, weight_scale_inv: Tensor, block_size: tuple[int, int]) -> Tensor:
    """x [..., K] times an FP8 weight [N, K] with one scale a block: [..., N] in x's dtype."""
    return F.linear(x, dequantize_fp8_block(weight, weight_scale_inv, block_size, x.dtype))


class Linear(nn.Module):
    """y = x W^T with W [rows, columns], no bias.

    Args:
        module: name in the checkpoint (decides whether the configuration quantizes it).
        keep_quantized: hold the stored form and dequantize at each call; otherwise hold W in `dtype`.
    """

    weight: Tensor
    weight_scale_inv: Tensor

    def __init__(
        self,
        config: KimiK2Config,
        module: str,
        rows: int,
        columns: int,
        *,
        dtype: torch.dtype,
        keep_quantized: bool = False,
    ) -> None:
        super().__init__()
        self.quantization = config.quantization
        self.suffixes = tuple(spec.name.rpartition(".")[2] for spec in linear_specs(config, module, rows, columns))
        self.quantized = keep_quantized and len(self.suffixes) > 1
        if self.quantized:
            for spec in linear_specs(config, module, rows, columns):
                self.register_buffer(spec.name.rpartition(".")[2], torch.empty(spec.shape, dtype=spec.dtype))
        else:
            self.weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype), requires_grad=False)

    def load(self, stored: dict[str, Tensor]) -> None:
        """Take the stored tensors (by suffix) of this Linear, dequantizing unless the stored form is kept."""
        if self.quantized:
            for suffix, tensor in stored.items():
                getattr(self, suffix).copy_(tensor)
        else:
            self.weight.copy_(dequantize_stored(stored, self.quantization, self.weight.dtype))

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weight [rows, columns] in `dtype`."""
        if not self.quantized:
            return self.weight.to(dtype)
        stored = {suffix: getattr(self, suffix) for suffix in self.suffixes}
        return dequantize_stored(stored, self.quantization, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[..., columns] to [..., rows], dtype kept."""
        if self.quantized and isinstance(self.quantization, Fp8BlockQuantization):
            return fp8_linear(x, self.weight, self.weight_scale_inv, self.quantization.weight_block_size)
        return F.linear(x, self.dequantized(x.dtype))
