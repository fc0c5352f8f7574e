"""Weights as they are stored: floats, or a quantized form that an operation dequantizes where it uses it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kimi_k2.ops.registry import ELEMENTWISE, operation
from kimi_k2.quantization import fp8_block
from kimi_k2.quantization.fp8_block import Fp8BlockFormat
from kimi_k2.quantization.stored import StoredFormat

dequantize_fp8_block = operation(fp8_block.dequantize_fp8_block, batch_invariant=ELEMENTWISE)


class Order(Protocol):
    """An order of a weight's values in memory that a kernel wants, other than the checkpoint's."""

    def restore(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """One matrix's tensors, by suffix, in the checkpoint's order again."""
        ...


@dataclass(frozen=True)
class Weight:
    """A matrix [N, K], or one an expert [E, N, K], as it is stored.

    Attributes:
        tensors: by the checkpoint's suffix: `weight`, with `weight_scale_inv` for FP8 blocks; `weight_packed` and
            `weight_scale` for INT4 groups.
        quantization: what they are stored in; None for floats.
        order: of the values in memory; None is the checkpoint's.
    """

    tensors: dict[str, Tensor]
    quantization: StoredFormat | None = None
    order: Order | None = None

    @property
    def fp8_block(self) -> tuple[int, int] | None:
        """(rows, columns) of a block that shares a scale, if this is an FP8 weight."""
        return self.quantization.weight_block_size if isinstance(self.quantization, Fp8BlockFormat) else None

    def expert(self, number: int) -> Weight:
        """The matrix [N, K] of one expert of [E, N, K]."""
        return replace(self, tensors={suffix: tensor[number] for suffix, tensor in self.tensors.items()})


def dequantize(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The matrix [N, K] in `dtype`, in the checkpoint's order."""
    tensors = weight.tensors if weight.order is None else weight.order.restore(weight.tensors)
    if weight.quantization is None:
        return tensors["weight"].to(dtype)
    if (block := weight.fp8_block) is not None:
        return dequantize_fp8_block(tensors["weight"], tensors["weight_scale_inv"], block, dtype)
    return weight.quantization.dequantize(tensors, dtype)
