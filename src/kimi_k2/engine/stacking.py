"""Two Linears of one input as one weight, so that the input is read and multiplied once."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.model.linear import Linear
from kimi_k2.ops.weights import Weight


def stack_rows(first: Linear, second: Linear, dtype: torch.dtype) -> Weight:
    """The rows of `first`, then those of `second`, as stored: both become views of it, so that nothing is held twice.

    Where a scale's block would straddle the two, or they are stored differently, it is a dequantized copy in `dtype`.
    """
    one, other = first.stored(), second.stored()
    held = one.quantization
    if held != other.quantization or not _ends_with_a_block(one, first.rows):
        return Weight({"weight": torch.cat((first.dequantized(dtype), second.dequantized(dtype)))})
    both: dict[str, Tensor] = {}
    for suffix, top in one.tensors.items():
        both[suffix] = _join(top, other.tensors[suffix])
    first.hold({suffix: tensor[: len(one.tensors[suffix])] for suffix, tensor in both.items()})
    second.hold({suffix: tensor[len(one.tensors[suffix]) :] for suffix, tensor in both.items()})
    return Weight(both, held)


def _ends_with_a_block(weight: Weight, rows: int) -> bool:
    """Whether other rows can follow: each tensor has an entry a row, or one for each whole block of rows."""
    held = weight.quantization
    if held is None:
        return True
    counts = [len(tensor) if tensor.dim() else 0 for tensor in weight.tensors.values()]
    return rows % held.block[0] == 0 and set(counts) <= {rows, rows // held.block[0]}


def _join(top: Tensor, bottom: Tensor) -> Tensor:
    """The two, one below the other; the tensor that they are views of, if they are views of one already."""
    shared = top.untyped_storage().data_ptr() == bottom.untyped_storage().data_ptr()
    if shared and bottom.storage_offset() == top.storage_offset() + top.numel():
        return top.as_strided((len(top) + len(bottom), *top.shape[1:]), top.stride())
    if top.dtype == torch.float8_e4m3fn:  # PyTorch concatenates no FP8
        return torch.cat((top.view(torch.uint8), bottom.view(torch.uint8))).view(top.dtype)
    return torch.cat((top, bottom))
