"""`next_step` in one launch (csrc/next_step.cu); PyTorch takes nine."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.kernels.common.build import find_nvcc
from kimi_k2.kernels.common.hardware import is_hopper
from kimi_k2.kernels.common.launch import expect, launch
from kimi_k2.kernels.common.operation import kernel_operation

NAMES = ("seq_lens", "input_ids", "positions", "slots", "block_table")
DTYPES = (torch.int32, torch.int32, torch.int64, torch.int64, torch.int32)


def supports(
    seq_lens: Tensor, input_ids: Tensor, positions: Tensor, slots: Tensor, block_table: Tensor, page: int
) -> bool:
    """On a Hopper GPU, contiguous, in the dtypes that the kernel takes."""
    tensors = seq_lens, input_ids, positions, slots, block_table
    dtypes = tuple(tensor.dtype for tensor in tensors)
    right = dtypes == DTYPES and all(tensor.is_contiguous() and len(tensor) == len(seq_lens) for tensor in tensors)
    return right and is_hopper(seq_lens.device) and find_nvcc() is not None


@kernel_operation("next_step", mutates_args=("seq_lens", "input_ids", "positions", "slots"))
def next_step(
    seq_lens: Tensor, input_ids: Tensor, positions: Tensor, slots: Tensor, block_table: Tensor, page: int
) -> None:
    """See `ops.mla.next_step`."""
    batch, wide = len(seq_lens), block_table.shape[1]
    tensors = seq_lens, input_ids, positions, slots, block_table
    for name, tensor, dtype in zip(NAMES, tensors, DTYPES, strict=True):
        expect(name, tensor, seq_lens.device, (batch, wide) if tensor is block_table else (batch,), dtype)
    launch("rowwise/next_step", "kimi_next_step", "next_step", seq_lens.device, *tensors, batch, wide, page)


next_step.fake(lambda seq_lens: None)
