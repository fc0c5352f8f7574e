"""`next_step` in one launch (csrc/next_step.cu); PyTorch takes nine."""

from __future__ import annotations

import torch
from torch import Tensor

from kimi_k2.errors import KernelError
from kimi_k2.kernels.common.build import find_nvcc
from kimi_k2.kernels.common.hardware import is_hopper
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation


def supports(
    seq_lens: Tensor, input_ids: Tensor, positions: Tensor, slots: Tensor, block_table: Tensor, page: int
) -> bool:
    """On a Hopper GPU, contiguous, in the dtypes that the kernel takes."""
    right = not _wrong(seq_lens, input_ids, positions, slots, block_table)
    return right and is_hopper(seq_lens.device) and find_nvcc() is not None


def _wrong(seq_lens: Tensor, input_ids: Tensor, positions: Tensor, slots: Tensor, block_table: Tensor) -> str:
    """What a tensor is and should be; empty if all are right."""
    batch = (len(seq_lens),)
    for name, tensor, dtype in (
        ("seq_lens", seq_lens, torch.int32),
        ("input_ids", input_ids, torch.int32),
        ("positions", positions, torch.int64),
        ("slots", slots, torch.int64),
        ("block_table", block_table, torch.int32),
    ):
        shape = tuple(tensor.shape[:1]) if name == "block_table" else tuple(tensor.shape)
        if tensor.dtype != dtype or shape != batch or not tensor.is_contiguous():
            return f"{name} is {tensor.dtype} {list(tensor.shape)}, expected contiguous {dtype} of {batch[0]} rows"
    return ""


@kernel_operation("next_step", mutates_args=("seq_lens", "input_ids", "positions", "slots"))
def next_step(
    seq_lens: Tensor, input_ids: Tensor, positions: Tensor, slots: Tensor, block_table: Tensor, page: int
) -> None:
    """See `ops.pages.next_step`.

    Raises:
        KernelError: a shape or dtype that the kernel does not take, or a failed launch.
    """
    wrong = _wrong(seq_lens, input_ids, positions, slots, block_table)
    if wrong:
        raise KernelError(wrong)
    given = seq_lens, input_ids, positions, slots, block_table, len(seq_lens), block_table.shape[1], page
    launch("rowwise/next_step", "kimi_next_step", "next_step", seq_lens.device, *given)


next_step.fake(lambda seq_lens: None)
