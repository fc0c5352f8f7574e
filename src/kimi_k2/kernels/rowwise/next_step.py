"""`next_step` in one launch (csrc/next_step.cu); PyTorch takes nine."""

from __future__ import annotations

from torch import Tensor

from kimi_k2.kernels.common.hardware import runs_cuda
from kimi_k2.kernels.common.launch import launch
from kimi_k2.kernels.common.operation import kernel_operation


def supports(
    seq_lens: Tensor, input_ids: Tensor, positions: Tensor, slots: Tensor, block_table: Tensor, page: int
) -> bool:
    """On a Hopper GPU, contiguous, in the dtypes that the kernel takes."""
    tensors = {
        "seq_lens": seq_lens, "input_ids": input_ids, "positions": positions, "slots": slots,
        "block_table": block_table,
    }  # fmt: skip
    return runs_cuda(seq_lens.device) and next_step.fits(**tensors)


@kernel_operation(
    "next_step",
    "seq_lens i32[B], input_ids i32[B], positions i64[B], slots i64[B], block_table i32[B,W]",
    mutates_args=("seq_lens", "input_ids", "positions", "slots"),
)
def next_step(
    seq_lens: Tensor, input_ids: Tensor, positions: Tensor, slots: Tensor, block_table: Tensor, page: int
) -> None:
    """See `ops.mla.next_step`."""
    tensors = seq_lens, input_ids, positions, slots, block_table
    launch("rowwise/next_step", "kimi_next_step", "next_step", seq_lens.device, *tensors, *block_table.shape, page)
